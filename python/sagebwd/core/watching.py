"""Who looks on at the calls of attention: `sagebwd.Monitor`s that have been started.

Every door to the kernels leads to a `forms.Form`, also from compiled code and from what a
checkpoint computes again. It tells here what it computed, with all that went in; nothing is kept
for that. Without watchers a call looks at an empty tuple.
"""

#: Objects with `forward_ran(form)` and `backward_ran(form, tensors)`: of a `forms.Form`, or of the
#: emulation's.
watchers = ()


def add(watcher):
    global watchers
    watchers = (*watchers, watcher)


def remove(watcher):
    global watchers
    watchers = tuple(w for w in watchers if w is not watcher)


def forward_ran(form):
    for watcher in watchers:
        watcher.forward_ran(form)


def backward_ran(form, *tensors):
    """tensors: dout, q, k, v, out, lse, dlse, dq, dk, dv, packing, k_mean; none of SLA2's calls,
    which monitors do not measure. Of calls with intervals `packing` is (bits, intervals), and of
    those whose mask or score indexes tensors it is these, behind the bits if there is a mask."""
    for watcher in watchers:
        watcher.backward_ran(form, tensors)
