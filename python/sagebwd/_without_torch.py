"""What stands in for the functions on torch tensors where PyTorch is not installed."""


def _refusal(name):
    def refuse(*args, **kwargs):
        raise ImportError(
            f"sagebwd.{name} needs PyTorch, which is not installed: pip install torch. Without it "
            "there are sagebwd.reference, trace, emit, build and doctor"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"sagebwd.{name} needs PyTorch: raises ImportError without it."
    return refuse


attention = _refusal("attention")
attention_backward = _refusal("attention_backward")
attention_forward = _refusal("attention_forward")
warmup = _refusal("warmup")
