// Fails the calls on files below FAILING_DIR with the number in the file FAILING_FLAG, while that
// exists: LD_PRELOAD for tests of a disk that is full, or of a file server that restarts.
// 122 (EDQUOT) fails writes only; every other number fails whatever opens, writes or syncs.
// 9999 lets calls on *.safetensors hang, as on a file server that no longer answers.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int failing(const char *path) {
    const char *dir = getenv("FAILING_DIR"), *flag = getenv("FAILING_FLAG");
    if (!dir || !flag || strncmp(path, dir, strlen(dir))) return 0;
    static int (*real)(const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "open");
    int before = errno, number;
    for (;;) {
        char text[16] = "";
        int fd = real(flag, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            if (read(fd, text, sizeof text - 1) < 0) text[0] = 0;
            close(fd);
        }
        number = atoi(text);
        if (number != 9999) break;
        if (!strstr(path, ".safetensors")) return 0;
        usleep(100000);
    }
    errno = before;
    return number;
}

static int failing_fd(int fd) {
    char link[64], path[PATH_MAX + 1] = "";
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, PATH_MAX) < 0) path[0] = 0;
    errno = before;
    return failing(path);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, name)
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        int number = failing(path); \
        if (number && number != EDQUOT) { errno = number; return -1; } \
        return real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(int, #name, int, const char *, int, ...); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        int number = failing(path); \
        if (number && number != EDQUOT) { errno = number; return -1; } \
        return real(at, path, flags, mode); \
    }
#define WRITE(name, declared, types, given) \
    ssize_t name declared { \
        REAL(ssize_t, #name, types); \
        int number = failing_fd(fd); \
        if (number) { errno = number; return -1; } \
        return real given; \
    }
#define SYNC(name) \
    int name(int fd) { \
        REAL(int, #name, int); \
        int number = failing_fd(fd); \
        if (number && number != EDQUOT) { errno = number; return -1; } \
        return real(fd); \
    }
#define COMMA ,
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
WRITE(write, (int fd, const void *data, size_t size), int COMMA const void * COMMA size_t, (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), int COMMA const void * COMMA size_t COMMA off_t, (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), int COMMA const void * COMMA size_t COMMA off64_t, (fd, data, size, at))
WRITE(writev, (int fd, const struct iovec *data, int count), int COMMA const struct iovec * COMMA int, (fd, data, count))
SYNC(fsync) SYNC(fdatasync)
