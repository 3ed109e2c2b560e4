"""The pages that `benchmarks.report` makes, one for each kind of results."""
