// LLVM's libSupport calls these functions, which not every system has: so nobody needs libtinfo, or
// glibc 2.36, on its account.

#include <sys/random.h>

extern "C" {

// LLVM before 19 asks terminfo whether a terminal has colours: nothing is known of any.
int setupterm(char*, int, int*) { return -1; }
int tigetnum(char*) { return -1; }
void* set_curterm(void*) { return nullptr; }
int del_curterm(void*) { return -1; }

// For names of temporary files, which are tried until one is new.
unsigned arc4random() {
  unsigned number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number))
    __builtin_abort(); // fewer than 256 bytes are never cut short
  return number;
}
}
