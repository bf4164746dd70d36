"""The report: one page that says where the time of a run goes, what to change, and how far to trust it."""
