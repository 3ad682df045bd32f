"""What attention computes, without kernels: exact, as the kernels round it, and how far apart."""
