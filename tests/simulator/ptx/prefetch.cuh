inline void prefetch_line(const void*) {}
