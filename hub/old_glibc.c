/*===- old_glibc.c - Functions as glibc 2.28 has them --------------------------===
 *
 * A library that is linked with a newer glibc asks for the newest version of each function, and
 * then loads on no older system. The Hub wants manylinux_2_28. Functions that glibc 2.28 has under
 * an older version are bound to that one here; those that it lacks are defined. All of it stays
 * hidden in the library. hub/write.py reads the library's symbols and notices those that are
 * missing here.
 *
 *===----------------------------------------------------------------------===*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef __x86_64__
#error "glibc's oldest version has other names on other processors"
#endif

#define HIDDEN __attribute__((visibility("hidden")))

/* `name` becomes a hidden function that goes on to glibc's `older` of that version. */
#define GOES_ON(name, older, version)                                                              \
  __asm__(".symver old_" #name ", " #older "@" version "\n"                                        \
          ".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name ":\n"   \
          "  endbr64\n  jmp *old_" #name "@GOTPCREL(%rip)\n.size " #name ", . - " #name)
#define VERSION(name, version) GOES_ON(name, name, version)

/* From 2.38 on C++ programs ask for these. They also read binary numbers ("0b1"), which nobody here
 * wants. */
GOES_ON(__isoc23_strtol, strtol, "GLIBC_2.2.5");
GOES_ON(__isoc23_strtoll, strtoll, "GLIBC_2.2.5");
GOES_ON(__isoc23_strtoul, strtoul, "GLIBC_2.2.5");
GOES_ON(__isoc23_strtoull, strtoull, "GLIBC_2.2.5");

VERSION(dladdr, "GLIBC_2.2.5");
VERSION(dlerror, "GLIBC_2.2.5");
VERSION(dlinfo, "GLIBC_2.3.3");
VERSION(dlopen, "GLIBC_2.2.5");
VERSION(dlsym, "GLIBC_2.2.5");
VERSION(exp, "GLIBC_2.2.5");
VERSION(log, "GLIBC_2.2.5");
VERSION(pow, "GLIBC_2.2.5");
VERSION(pthread_attr_setstacksize, "GLIBC_2.2.5");
VERSION(pthread_create, "GLIBC_2.2.5");
VERSION(pthread_detach, "GLIBC_2.2.5");
VERSION(pthread_getname_np, "GLIBC_2.12");
VERSION(pthread_getspecific, "GLIBC_2.2.5");
VERSION(pthread_join, "GLIBC_2.2.5");
VERSION(pthread_key_create, "GLIBC_2.2.5");
VERSION(pthread_key_delete, "GLIBC_2.2.5");
VERSION(pthread_once, "GLIBC_2.2.5");
VERSION(pthread_rwlock_rdlock, "GLIBC_2.2.5");
VERSION(pthread_rwlock_unlock, "GLIBC_2.2.5");
VERSION(pthread_rwlock_wrlock, "GLIBC_2.2.5");
VERSION(pthread_setname_np, "GLIBC_2.12");
VERSION(pthread_setspecific, "GLIBC_2.2.5");
VERSION(pthread_sigmask, "GLIBC_2.2.5");

/* libstdc++ reads it to leave out atomic operations, which are always right. */
HIDDEN char __libc_single_threaded = 0;

HIDDEN int stat(const char* path, struct stat* to) { return (int)syscall(SYS_stat, path, to); }
HIDDEN int lstat(const char* path, struct stat* to) { return (int)syscall(SYS_lstat, path, to); }
HIDDEN int fstat(int file, struct stat* to) { return (int)syscall(SYS_fstat, file, to); }
/* The structures are the same on this processor. */
HIDDEN int fstat64(int file, struct stat64* to) { return (int)syscall(SYS_fstat, file, to); }

/* LLVM has it for statistics that nobody here asks for. */
HIDDEN struct mallinfo2 mallinfo2(void) {
  struct mallinfo2 none = {0};
  return none;
}

/* Before 2.30 a thread waits by the clock of the condition variable, which is the system's. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  clockid_t clock, const struct timespec* until) {
  typedef int Wait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  Wait* newer = (Wait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (newer)
    return newer(condition, mutex, clock, until);
  const long second = 1000000000;
  struct timespec now, there;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &there) != 0)
    return EINVAL;
  there.tv_sec += until->tv_sec - now.tv_sec;
  there.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (there.tv_nsec < 0)
    there.tv_nsec += second, there.tv_sec -= 1;
  if (there.tv_nsec >= second)
    there.tv_nsec -= second, there.tv_sec += 1;
  return pthread_cond_timedwait(condition, mutex, &there);
}
