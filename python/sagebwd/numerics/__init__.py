"""What attention computes, without kernels: exactly, and as the kernels round it, with the errors."""
