"""sagebwd inside other libraries: each module is imported by who has that library."""
