/* Gives the Python processes that preload it a wall clock of their own: the machine's, moved by an offset.

   The offset is the number of seconds in the file that WALL_CLOCK names, 8 bytes as this machine stores an int64_t.
   The file is mapped into each process, so a new number in it is a jump at once, in every such process. Deadlines on
   the wall clock are moved back by the offset before the kernel sees them, because the kernel's clock has not moved:
   a wait that is under way while the clock jumps keeps its length. Everything else is untouched: CLOCK_MONOTONIC,
   sleeps and timeouts, the times of files, and programs other than Python. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* 2001-09-09: a later time is the wall clock's, for CLOCK_MONOTONIC says it only after 31 years without a boot. */
#define FIRST_WALL_S 1000000000

static const int64_t no_offset_s = 0;
static const volatile int64_t *offset_s = &no_offset_s;

/* The C library's own functions. They are looked up once, before the program begins: a later look-up waits for the lock
   of the dynamic linker, whose holder may wait for the thread that asks. */
#define EACH(f)                                                                                                        \
  f(clock_gettime) f(timespec_get) f(gettimeofday) f(clock_nanosleep) f(pthread_cond_timedwait)                        \
      f(pthread_cond_clockwait) f(pthread_mutex_timedlock) f(sem_timedwait) f(sem_clockwait) f(syscall)
#define DECLARE(name) static __typeof__(name) *own_##name;
#define LOOK_UP(name) own_##name = own(#name);
#define OWN(name)                                                                                                      \
  if (own_##name == NULL)                                                                                              \
  look_up()

EACH(DECLARE)

/* Returns one of them. The condition variables' first version, which dlsym may find, has another layout than the one
   that programs have used since 2003. */
static void *own(const char *name)
{
  void *found = strncmp(name, "pthread_cond_", 13) == 0 ? dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2") : NULL;
  if (found == NULL)
    found = dlsym(RTLD_NEXT, name);
  if (found == NULL)
    abort();
  return found;
}

static void look_up(void)
{
  EACH(LOOK_UP)
}

__attribute__((constructor(101))) static void begin(void)
{
  look_up();
  const char *path = getenv("WALL_CLOCK");
  if (path == NULL || strncmp(program_invocation_short_name, "python", 6) != 0)
    return;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    abort();
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED)
    abort();
  close(file);
  offset_s = mapped;
}

static int is_wall(clockid_t clock)
{
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

/* Returns the moment of the machine's clock at which the process's clock reads `at`; `room` holds it. */
static const struct timespec *machines(const struct timespec *at, struct timespec *room)
{
  if (at == NULL || at->tv_sec < FIRST_WALL_S)
    return at;
  *room = *at;
  room->tv_sec -= *offset_s;
  return room;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
  OWN(clock_gettime);
  int failed = own_clock_gettime(clock, now);
  if (!failed && is_wall(clock))
    now->tv_sec += *offset_s;
  return failed;
}

int timespec_get(struct timespec *now, int base)
{
  OWN(timespec_get);
  int done = own_timespec_get(now, base);
  if (done == TIME_UTC)
    now->tv_sec += *offset_s;
  return done;
}

int gettimeofday(struct timeval *now, void *zone)
{
  OWN(gettimeofday);
  int failed = own_gettimeofday(now, zone);
  if (!failed)
    now->tv_sec += *offset_s;
  return failed;
}

time_t time(time_t *into)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into != NULL)
    *into = now.tv_sec;
  return now.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *at, struct timespec *left)
{
  OWN(clock_nanosleep);
  struct timespec room;
  return own_clock_nanosleep(clock, flags, is_wall(clock) && (flags & TIMER_ABSTIME) ? machines(at, &room) : at, left);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *at)
{
  OWN(pthread_cond_timedwait);
  struct timespec room;
  return own_pthread_cond_timedwait(condition, mutex, machines(at, &room));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *at)
{
  OWN(pthread_cond_clockwait);
  struct timespec room;
  return own_pthread_cond_clockwait(condition, mutex, clock, machines(at, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *at)
{
  OWN(pthread_mutex_timedlock);
  struct timespec room;
  return own_pthread_mutex_timedlock(mutex, machines(at, &room));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *at)
{
  OWN(sem_timedwait);
  struct timespec room;
  return own_sem_timedwait(semaphore, machines(at, &room));
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *at)
{
  OWN(sem_clockwait);
  struct timespec room;
  return own_sem_clockwait(semaphore, clock, machines(at, &room));
}

/* Abseil, which Ray and gRPC wait with, and Rust's library make their futex calls this way. */
long syscall(long number, ...)
{
  OWN(syscall);
  va_list given;
  long a[6];
  struct timespec room;
  va_start(given, number);
  for (int i = 0; i < 6; i++)
    a[i] = va_arg(given, long);
  va_end(given);
  if (number == SYS_clock_gettime)
    return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET)
    a[3] = (long)machines((const struct timespec *)a[3], &room);
  return own_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
