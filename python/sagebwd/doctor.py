"""`python -m sagebwd.doctor`: what this machine has for sagebwd. In Python: `sagebwd.doctor()`."""

from sagebwd._doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
