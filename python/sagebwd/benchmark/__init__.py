"""`sagebwd bench` and `sagebwd.bench` consist of these parts; bench/ measures with the same."""
