"""What a Hydra application, or a mapping in a file, makes of ``chakra_profile``, and where each setting came from.

``chakra-capture config`` asks it, in a process of its own (``__main__``). A job needs none of it: there Hydra composes
and ``settings_from`` reads.
"""
