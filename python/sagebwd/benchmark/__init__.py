"""What `sagebwd bench` and `sagebwd.bench` consist of; bench/ measures with the same parts."""
