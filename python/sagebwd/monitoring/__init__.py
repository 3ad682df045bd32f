"""`sagebwd.Monitor`: errors of real calls, beside the training that they belong to."""


class MonitorWarning(UserWarning):
    """A figure of a `sagebwd.Monitor` is past its threshold, or a call cannot be sampled."""
