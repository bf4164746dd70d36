"""Reading: trace files and folders to typed columns, and merged tables back to frames."""

# Of the tables in ``schema``; here, where asking for it imports no polars.
SCHEMA_VERSION = 1
