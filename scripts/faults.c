/* Fails the n-th call that would write below a folder, or read from it: for scripts/reliability.py faults, by LD_PRELOAD.
   What is mapped into memory is not read by a call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static char kind;
static long target, code;
static long count;

/* From now on: kind 'w' or 'r'; target 0 only counts; -n: all fail from the n-th on; code: the errno. */
void fault_set(const char *place, int what, long number, long error) {
    kind = (char)what, target = number, code = error, count = 0;
    strncpy(folder, place, sizeof folder - 1);
}

/* How many calls there were; none is counted after it. */
long fault_count(void) {
    *folder = 0;
    return count;
}

static int inside(const char *path) {
    char whole[8192];
    size_t size = strlen(folder);
    if (!size || !path) return 0;
    if (*path != '/') { /* what lies in a folder that is the current one is named without it */
        if (!getcwd(whole, 4096) || strlen(path) > 4000) return 0;
        path = strcat(strcat(whole, "/"), path);
    }
    return !strncmp(path, folder, size) && (!path[size] || path[size] == '/');
}

static int below(int descriptor) {
    char link[64], path[4096];
    if (!*folder) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return inside(path);
}

static int fails(char what) {
    if (what != kind) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (target < 0 ? number < -target : number != target) return 0;
    errno = (int)code;
    return 1;
}

#define REAL(result, name, ...) static result (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return below(fd) && fails('w') ? -1 : real(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int several) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return below(fd) && fails('w') ? -1 : real(fd, parts, several);
}
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    return below(fd) && fails('r') ? -1 : real(fd, data, size);
}
int fsync(int fd) {
    REAL(int, fsync, int);
    return below(fd) && fails('w') ? -1 : real(fd);
}
int ftruncate64(int fd, off64_t size) {
    REAL(int, ftruncate64, int, off64_t);
    return below(fd) && fails('w') ? -1 : real(fd, size);
}
int ftruncate(int fd, off_t size) {
    REAL(int, ftruncate, int, off_t);
    return below(fd) && fails('w') ? -1 : real(fd, size);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return inside(to) && fails('w') ? -1 : real(from, to);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return inside(path) && fails('w') ? -1 : real(path, mode);
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    return inside(path) && fails('w') ? -1 : real(path);
}
static int opened(const char *path, int flags) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
    return inside(path) && fails(writes ? 'w' : 'r');
}
#define OPENS(name)                                                        \
    int name(const char *path, int flags, ...) {                           \
        REAL(int, name, const char *, int, ...);                           \
        va_list more; va_start(more, flags);                               \
        mode_t mode = va_arg(more, mode_t); va_end(more);                  \
        return opened(path, flags) ? -1 : real(path, flags, mode);         \
    }
OPENS(open)
OPENS(open64)
