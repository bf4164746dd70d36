"""Would simulators and replayers run these Chakra traces, and would what they simulate be what was measured?"""
