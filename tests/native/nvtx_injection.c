/* An NVTX tool that writes down what it is told: one line for each domain, string, push and pop.

   Built by the tests, and loaded by the NVTX library of a process whose environment names it in
   NVTX_INJECTION64_PATH. A line holds: what, thread id, CLOCK_MONOTONIC in ns, domain, name; with
   tabs in between. The file is that of NVTX_TEST_OUTPUT with the process id added.

   The few declarations of NVTX's tools interface, version 3, that it takes are repeated here, so
   that no header need be installed. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*function)(void);
typedef struct {
    size_t struct_size;
    int (*get_module_function_table)(int module, function ***table, unsigned *size);
} callbacks;
typedef const void *(*get_export_table)(uint32_t id);

enum { EXPORT_CALLBACKS = 1 };
enum { MODULE_CORE2 = 5 };
enum { RANGE_PUSH = 4, RANGE_POP = 5, REGISTER_STRING = 10, DOMAIN_CREATE = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message; /* characters, or a handle that register_string has given out */
} event;

static int output = -1;

static void write_line(const char *what, const char *domain, const char *name) {
    char line[4096];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(line, sizeof line, "%s\t%ld\t%lld\t%s\t%s\n", what,
                          (long)syscall(SYS_gettid), now.tv_sec * 1000000000LL + now.tv_nsec,
                          domain ? domain : "", name ? name : "");
    if (length < 0 || length >= (int)sizeof line || write(output, line, length) != length)
        abort(); /* a test must not take half a record for a whole one */
}

/* Handles are the names themselves. */
static void *domain_create(const char *name) {
    write_line("domain", name, "");
    return strdup(name);
}

static void *register_string(void *domain, const char *name) {
    write_line("string", domain, name);
    return strdup(name);
}

static int range_push(void *domain, const event *attributes) {
    int is_text = attributes->message_type == MESSAGE_ASCII ||
                  attributes->message_type == MESSAGE_REGISTERED;
    write_line("push", domain, is_text ? attributes->message : "(no text)");
    return 0;
}

static int range_pop(void *domain) {
    write_line("pop", domain, "");
    return 0;
}

int InitializeInjectionNvtx2(get_export_table get) {
    const callbacks *entry = get(EXPORT_CALLBACKS);
    function **table = NULL;
    unsigned size = 0;
    const char *path = getenv("NVTX_TEST_OUTPUT");
    char own[4096];
    if (!entry || !path || !entry->get_module_function_table(MODULE_CORE2, &table, &size) ||
        size <= DOMAIN_CREATE)
        return 0;
    snprintf(own, sizeof own, "%s.%ld", path, (long)getpid());
    if (output < 0)
        output = open(own, O_CREAT | O_APPEND | O_WRONLY, 0600);
    if (output < 0)
        return 0;
    *table[RANGE_PUSH] = (function)range_push;
    *table[RANGE_POP] = (function)range_pop;
    *table[REGISTER_STRING] = (function)register_string;
    *table[DOMAIN_CREATE] = (function)domain_create;
    return 1;
}
