"""``python -P -m chakra_capture.runner PLAN ARGS...``: what ``chakra-capture run`` becomes; PLAN is JSON."""

import sys

from chakra_capture.runner.process import main

main(sys.argv[1], sys.argv[2:])
