"""Our attention beside PyTorch's on this GPU: error against FP64, and time forward + backward.

A quick look, not a benchmark: bench/ holds the harness, with interleaved rounds and records.
"""

import torch
import torch.nn.functional as F

import sagebwd

BATCH, HEADS, HEAD_DIM = 1, 16, 128


def inputs(tokens, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    tensors = [torch.randn(shape, device="cuda", generator=generator) for _ in range(4)]
    return [tensor.to(torch.bfloat16) for tensor in tensors]


def with_gradients(function, q, k, v, dout):
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = function(q, k, v)
    out.backward(dout)
    return {"O": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}


def relative_l2(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()


def milliseconds(function, q, k, v, dout, repeats=20):
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(q, k, v).backward(dout)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
        q.grad = k.grad = v.grad = None
    return sorted(times[3:])[repeats // 2]


def main():
    ours, theirs = sagebwd.attention, F.scaled_dot_product_attention
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, D {HEAD_DIM}, bf16")

    tensors = inputs(1024)
    exact = with_gradients(theirs, *(tensor.double() for tensor in tensors))
    print("relative L2 error against FP64, N 1024")
    for name, function in (("sagebwd", ours), ("PyTorch", theirs)):
        result = with_gradients(function, *tensors)
        errors = "  ".join(f"{t} {relative_l2(result[t], exact[t]):.4f}" for t in exact)
        print(f"  {name}  {errors}")

    tensors = inputs(8192)
    print(f"forward + backward, N 8192, {HEADS} heads, median of 20")
    for name, function in (("sagebwd", ours), ("PyTorch", theirs)):
        print(f"  {name}  {milliseconds(function, *tensors):.2f} ms")


if __name__ == "__main__":
    main()
