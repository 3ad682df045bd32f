"""SLA2 (arXiv 2602.12675): attention of which some blocks are exact and the rest is linear."""
