/* A shell that has been started and waits for commands: preloaded into /bin/sh, it stands between the C library and the
 * shell's main(). Each request forks the process, and the copy goes on into main() with the request's arguments,
 * environment, folder and files. That is `sh -c COMMAND` without execve(), the loader and their mappings.
 *
 * It starts with a socket as its file 0 and a page that it shares with the agent as its file 1.
 * A request is one message: three open files, and FOLDER\0 /bin/sh\0 -c\0 COMMAND\0 NAME=VALUE\0 ... The copy is a
 * child of the agent, which reads its process id in a shared page; the kernel writes it there before the copy runs.
 * What can't be done exactly ends this process with no id written, and the agent starts the command itself.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/prctl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FILES = 3, ARGUMENTS = 3, VARIABLES = 500, BYTES = 1 << 16, PAGE = 4096 };

typedef int Main(int, char **, char **);

static Main *shell;

static void need(int condition) {
    if (!condition)
        _exit(1);
}

/* Where this process is in memory, for prctl(2); what it was started with is a part of that. */
static struct prctl_mm_map read_map(void) {
    struct prctl_mm_map map = {0};
    uint64_t field[52] = {0};
    char text[2048];
    int file = open("/proc/self/stat", O_RDONLY);
    ssize_t length = read(file, text, sizeof text - 1);
    need(length > 0);
    close(file);
    text[length] = 0;
    char *rest = strrchr(text, ')'); /* the end of the second field, see proc(5) */
    for (int number = 3; rest && number < 52; number++) {
        rest = strchr(rest, ' ');
        if (rest)
            field[number] = strtoull(++rest, NULL, 10);
    }
    map.start_code = field[26], map.end_code = field[27], map.start_stack = field[28];
    map.start_data = field[45], map.end_data = field[46], map.start_brk = field[47];
    map.arg_start = field[48], map.arg_end = field[49], map.env_start = field[50], map.env_end = field[51];
    map.brk = (uintptr_t)sbrk(0);
    map.exe_fd = -1;
    need(prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) == 0);
    return map;
}

/* The string at `rest`, which then is behind it. */
static char *next(char **rest, const char *end) {
    char *text = *rest;
    need(text < end);
    *rest += strlen(text) + 1;
    return text;
}

/* Wait for a request and take it in: its files become 0, 1 and 2, the lowest numbers that are free. */
static void receive(int channel, char request[BYTES], char **arguments, char **variables, struct prctl_mm_map *map) {
    union {
        char space[CMSG_SPACE(FILES * sizeof(int))];
        struct cmsghdr head;
    } control;
    struct iovec content = {request, BYTES};
    struct msghdr message = {0};
    message.msg_iov = &content, message.msg_iovlen = 1;
    message.msg_control = &control, message.msg_controllen = sizeof control;
    ssize_t length = recvmsg(channel, &message, 0);
    need(length > 0 && message.msg_controllen == sizeof control);
    need(!(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && request[length - 1] == 0);
    char *rest = request, *end = request + length;
    need(chdir(next(&rest, end)) == 0);
    map->arg_start = (uintptr_t)rest;
    for (int number = 0; number < ARGUMENTS; number++)
        arguments[number] = next(&rest, end);
    map->arg_end = map->env_start = (uintptr_t)rest;
    map->env_end = (uintptr_t)end;
    int number = 0;
    while (rest < end) {
        need(number < VARIABLES);
        variables[number++] = next(&rest, end);
    }
    variables[number] = NULL;
}

static void close_files(void) {
    for (int file = 0; file < FILES; file++)
        close(file);
}

/* In place of the shell's main(); goes on into it in the copies only. */
static int wait_for_commands(int count, char **arguments, char **environment) {
    (void)environment;
    char request[BYTES];
    char *variables[VARIABLES + 1];
    int channel = fcntl(0, F_DUPFD, FILES);
    int *child = mmap(NULL, sizeof *child, PROT_READ | PROT_WRITE, MAP_SHARED, 1, 0);
    need(count == ARGUMENTS && channel >= 0 && child != MAP_FAILED);
    need(madvise(child, sizeof *child, MADV_DONTFORK) == 0);
    close_files();
    free(malloc(1)); /* the heap is set up here, not in each copy */
    struct prctl_mm_map map = read_map();
    uintptr_t stack = (uintptr_t)&map & -(uintptr_t)PAGE;
    /* Not executable, as that of every shell: the compiler says nothing about it, and the loader then makes it so. */
    need(mprotect((void *)stack, map.env_end - stack, PROT_READ | PROT_WRITE | PROT_GROWSDOWN) == 0);
    prctl(PR_SET_DUMPABLE, 0); /* no command can trace it */
    for (;;) {
        receive(channel, request, arguments, variables, &map);
        long process = syscall(SYS_clone, CLONE_PARENT | CLONE_PARENT_SETTID | SIGCHLD, NULL, child, NULL, 0L);
        need(process >= 0);
        if (process == 0)
            break;
        close_files();
    }
    prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0);
    prctl(PR_SET_DUMPABLE, 1);
    setsid();
    close(channel);
    environ = variables;
    return shell(count, arguments, variables);
}

/* What a program calls first, with its main(). */
int __libc_start_main(Main *main, int count, char **arguments, void *start, void *end, void *unload, void *stack) {
    int (*begin)(Main *, int, char **, void *, void *, void *, void *) = dlsym(RTLD_NEXT, "__libc_start_main");
    shell = main;
    return begin(wait_for_commands, count, arguments, start, end, unload, stack);
}
