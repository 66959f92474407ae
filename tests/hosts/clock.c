/* A clock of the day that is wrong by SHIFT_SECONDS, for each program that loads this library before the others.

   Waiting until a time of that clock is left to the kernel, whose clock is right: so such times are shifted back. The
   same functions take times of the other clock, which counts from the start of the machine: these are small numbers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static const time_t YEAR_2001 = 1000000000;

static time_t shift(void) {
    const char *text = getenv("SHIFT_SECONDS");
    return text ? atol(text) : 0;
}

static struct timespec right(const struct timespec *wrong) {
    struct timespec time = *wrong;
    if (time.tv_sec > YEAR_2001)
        time.tv_sec -= shift();
    return time;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &time))
        return -1;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) /* the newest version: an older one takes other conditions */
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
            RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec time = right(until);
    return real(condition, mutex, &time);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec time = right(until);
    return real(semaphore, &time);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = (int (*)(pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec time = right(until);
    return real(mutex, &time);
}
