"""The sections of the report, each made from the facts of a run."""
