"""``chakra-capture run``: a training script recorded without a change to it.

``script`` runs it as Python would, ``imports`` tells when a framework is loaded, ``frameworks`` then puts the
integration of Lightning, Ignite, MONAI or the Hugging Face Trainer into each training, and ``torch_calls`` reports what
a loop of the script's own does to ``loop_watch``, which finds the steps in it.
"""
