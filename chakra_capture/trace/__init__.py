"""Reading: trace files and folders to typed columns, and merged tables back to frames."""
