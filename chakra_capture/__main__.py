"""``python -m chakra_capture``: the command line where no script is installed."""

from chakra_capture.cli.main import main

main()
