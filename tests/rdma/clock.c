/* Replaces the clock of perftest in an emulated virtual machine. Loaded with LD_PRELOAD.
 *
 * perftest (the RDMA benchmarks ib_write_bw and others) measures time with the cycle counter of the processor. It calibrates the
 * counter against gettimeofday in 200 intervals of 0.1 to 2 ms. An emulated processor may stop for longer than that, while it
 * waits for a processor of the real machine. Then the calibration fails, or its result is several times too high or too low. A
 * wrong result makes every bandwidth wrong.
 *
 * With this library, the counter counts nanoseconds, and gettimeofday returns the same time. This time follows the kernel's
 * monotonic clock, but skips long pauses during a calibration: between a call of gettimeofday and the reading before or after it,
 * at most CAP_NS nanoseconds count. Between two readings of the counter, as around a measurement, all time counts.
 *
 * prctl(PR_SET_TSC) makes the instruction that reads the counter (rdtsc) raise SIGSEGV. The signal handler then returns the time.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define CAP_NS 50000ull

static uint64_t last_ns, virtual_ns;
static int last_was_call;

static uint64_t now_ns(int is_call)
{
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now); /* clock_gettime of the C library may use rdtsc itself */
    uint64_t ns = now.tv_sec * 1000000000ull + now.tv_nsec, passed = ns - last_ns;
    if ((is_call || last_was_call) && passed > CAP_NS)
        passed = CAP_NS;
    last_ns = ns;
    last_was_call = is_call;
    return virtual_ns += passed;
}

static void read_counter(int signal_number, siginfo_t *information, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    (void)information;
    if (code[0] != 0x0f || code[1] != 0x31) { /* not rdtsc: a real fault; the instruction is repeated and ends the process */
        signal(signal_number, SIG_DFL);
        return;
    }
    uint64_t cycles = now_ns(0);
    registers[REG_RAX] = cycles & 0xffffffff;
    registers[REG_RDX] = cycles >> 32;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void forbid_counter(void)
{
    struct sigaction action = {.sa_sigaction = read_counter, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, 0);
    prctl(PR_SET_TSC, PR_TSC_SIGSEGV);
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    uint64_t ns = now_ns(1);
    (void)zone;
    time->tv_sec = ns / 1000000000ull;
    time->tv_usec = ns / 1000 % 1000000;
    return 0;
}
