"""One run of a job: the handler, its lease, its reports."""
