"""The command line; verbs import what they need when they run, so that start-up stays short."""
