/* Preloaded by a test: calls on files under $HANG_UNDER block while the file $HANG_WHILE exists, as those on a network
   file system do whose server is gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int hangs(const char *path) {
    const char *under = getenv("HANG_UNDER"), *mark = getenv("HANG_WHILE");
    return under && mark && path && !strncmp(path, under, strlen(under)) && !syscall(SYS_access, mark, F_OK);
}

static void wait_for(const char *path) {
    while (hangs(path)) usleep(20000);
}

static void wait_for_file(int fd) {
    const char *mark = getenv("HANG_WHILE");
    if (!mark || syscall(SYS_access, mark, F_OK)) return;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (size > 0) {
        path[size] = 0;
        wait_for(path);
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    wait_for(path);
    return REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    wait_for(path);
    return REAL(open)(path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t size) { wait_for_file(fd); return REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int count) { wait_for_file(fd); return REAL(writev)(fd, data, count); }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    wait_for_file(to);
    return REAL(sendfile64)(to, from, at, size);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return sendfile64(to, from, at, size); }

FILE *fopen(const char *path, const char *mode) { wait_for(path); return REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { wait_for(path); return REAL(fopen)(path, mode); }
int close(int fd) { wait_for_file(fd); return REAL(close)(fd); }
int mkdir(const char *path, mode_t mode) { wait_for(path); return REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { wait_for(to); return REAL(rename)(from, to); }
int unlink(const char *path) { wait_for(path); return REAL(unlink)(path); }
