"""What the installed scripts call; light, because a process that is spawned imports its parent's script once more."""


def chakra_capture() -> None:
    """Run ``chakra-capture``."""
    from chakra_capture.cli.main import main

    main()


def merge_traces() -> None:
    """Run ``merge-traces``."""
    from chakra_capture.cli.main import merge_traces

    merge_traces()
