"""What a recording comes to, attached to the loggers of a trainer once the summary of the run has been written.

Numbers go through ``log_metrics``; texts where Lightning's class for a service has a place for them, else, as with CSV
or a logger of one's own, through ``log_hyperparams``. Both are what every logger of Lightning has.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PREFIX = "chakra_capture"


class LoggedSummary:
    """Waits for the summary of a run, and gives it to the loggers of a trainer.

    Args:
        trainer: of the process that has the summary written, global rank 0.
        summary: the file; one that is there already is of an earlier training.
    """

    def __init__(self, trainer: Any, summary: Path) -> None:
        self._trainer = trainer
        self._summary = summary
        self._before = _stamp(summary)
        if not trainer.loggers:
            logger.warning(
                "chakra_profile.log_to_logger is on, but this trainer has no logger (logger=False): what it would get "
                "stands in final_summary.json alone. Give the Trainer a logger, or set log_to_logger to false."
            )

    def attach(self) -> None:
        """Give it to every logger; one that refuses keeps neither the others nor the training."""
        loggers = self._trainer.loggers
        if not loggers:
            return
        try:
            final = self._written()
            numbers, texts = headline_numbers(final), _texts(final)
        except (OSError, ValueError, KeyError) as fault:
            logger.warning("Nothing was attached to the loggers of this training: %s", fault)
            return
        for each in loggers:
            what = "headline numbers"
            try:
                step = int(self._trainer.global_step)
                if numbers:
                    each.log_metrics(numbers, step=step)
                what = "diagnosis and summary"
                _way(each)(each, texts, step)
            except Exception as fault:  # noqa: BLE001 (somebody else's, perhaps over a network)
                logger.warning(
                    "The %s were not attached to %s, training goes on: %s: %s",
                    what,
                    type(each).__name__,
                    type(fault).__name__,
                    fault,
                )

    def _written(self) -> dict[str, Any]:
        if _stamp(self._summary) in (None, self._before):
            raise FileNotFoundError(f"{self._summary} was not written.")
        found: dict[str, Any] = json.loads(self._summary.read_text())
        return found


def headline_numbers(final: dict[str, Any]) -> dict[str, float]:
    """Step time, each phase of a step, and the share of time that is in a phase: means over the ranks that measured it.

    Args:
        final: a final_summary.json.
    """
    found: dict[str, list[float]] = {}
    for rank in final["chakra_capture"]["phases"].values():
        values = {"step_time_mean_ms": _ms(rank["step_mean_ns"]), "step_time_median_ms": _ms(rank["step_median_ns"])}
        values |= {f"{row['phase']}_mean_ms": _ms(row["mean_ns"]) for row in rank["table"] if row["place"] == "step"}
        values["coverage"] = rank["coverage"]
        for name, value in values.items():
            if value is not None:  # not measured, and no 0
                found.setdefault(f"{_PREFIX}/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _texts(final: dict[str, Any]) -> dict[str, str]:
    verdict = final["primary_diagnosis"]
    return {
        f"{_PREFIX}/diagnosis": f"{verdict['kind']}: {verdict['summary']}",
        f"{_PREFIX}/summary": final["text"].rstrip(),
    }


def _way(one: Any) -> Callable[[Any, dict[str, str], int], None]:
    # By their names: either package of Lightning has its own classes, and users derive from them.
    names = (cls.__name__ for cls in type(one).__mro__)
    ways = {"TensorBoardLogger": _to_tensorboard, "WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
    return next((ways[name] for name in names if name in ways), _to_hyperparameters)


def _to_tensorboard(one: Any, texts: dict[str, str], step: int) -> None:
    for name, text in texts.items():
        # TensorBoard shows Markdown, where lines that are indented so stay as they are.
        one.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)


def _to_wandb(one: Any, texts: dict[str, str], step: int) -> None:
    one.log_text(f"{_PREFIX}/findings", columns=[*texts], data=[[*texts.values()]])


def _to_mlflow(one: Any, texts: dict[str, str], step: int) -> None:
    for name, text in texts.items():
        one.experiment.log_text(one.run_id, text, f"{name}.txt")


def _to_hyperparameters(one: Any, texts: dict[str, str], step: int) -> None:
    one.log_hyperparams(texts)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
