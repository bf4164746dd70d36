"""Where the update groups of a MONAI trainer end."""

from typing import Any

from ignite.engine import Engine

from chakra_capture.integrations import ignite


class ChakraProfileHandler(ignite.ChakraProfileHandler):
    """Records the window of ``chakra_profile`` settings during ``trainer.run``: ``train_handlers=[handler]``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, settings: object) -> None:
        super().__init__(settings)

    def _start(self, engine: Any) -> None:
        for entry in [entry for entries in getattr(engine, "_event_handlers", {}).values() for entry in entries]:
            # What is to run every so often is wrapped by Ignite.
            handler = getattr(entry[0], "_parent", lambda own=entry[0]: own)()
            if isinstance(evaluator := getattr(handler, "validator", None), Engine):
                self.attach_validation(evaluator)
        super()._start(engine)

    def _num_steps_before(self, engine: Any, iterations: int) -> int:
        size, length = _group_size(engine), engine.state.epoch_length
        if not length:
            return iterations // size
        epochs, rest = divmod(iterations, length)
        return int(epochs * -(-length // size) + rest // size)

    def _has_updated(self, engine: Any) -> bool:
        size, length, iteration = _group_size(engine), engine.state.epoch_length, engine.state.iteration
        if not length:
            return bool(iteration % size == 0)
        place = (iteration - 1) % length + 1
        return bool(place % size == 0 or place == length)

    def _goes_on_after_epoch(self) -> bool:
        # MONAI zeroes the gradients of a group that the end of an epoch has cut.
        return False


def _group_size(engine: Any) -> int:
    # Known only after the handlers are attached, and only to a SupervisedTrainer.
    return getattr(engine, "accumulation_steps", 1)
