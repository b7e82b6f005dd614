/* A libnvidia-ml.so.1 without a GPU: it answers every call from a scenario file.
 *
 * RACKPROOF_NVML_SCENARIO is the path of the file. It is read again when it changes, so a fault can appear while a program runs.
 * One `key=value` per line. The last line that matches a call wins, so a scenario first includes the file of a healthy machine
 * and then adds the lines of its fault.
 *
 *   # text                       a comment
 *   include=healthy-h100x8.conf  the lines of another file; the path is relative to this file. If only the included file changes,
 *                                the scenario is not read again.
 *   PowerUsage=71000             key: name of the NVML function without nvmlDeviceGet or nvmlSystemGet, and without _v2 or _v3
 *   RemappedRows=0 1 1 0         several results: separated by spaces, in the order of the function's arguments
 *   ClockInfo.1=1980             input arguments follow the key after dots, in the order of the function; here the clock, 1 = SM
 *   NvLinkState.*=1              shell wildcards: `*`, `?`, `[89]`
 *   P2PStatus.5.2=0              a second GPU is given by its NVML index; here GPU 5, and the P2P capability 2 = NVLink
 *   gpu.3.PowerUsage=0           only for the GPU with NVML index 3; without `gpu.3.` for every GPU
 *   gpu.3.*=!15                  every call for GPU 3 fails with NVML return code 15
 *   gpu.3.*=!3 for 5 after 20    calls 21 to 25 that reach this line fail with code 3; the others use the lines above this line
 *   gpu.3.PowerUsage=~5s         the call waits 5 seconds, then uses the lines above this line
 *   FieldValues.161.5=0          field 161, scope 5 (here a link); `FieldValues.161` is for scopes without a line of their own
 *   FieldValues.74=960194000 3   the value, and its NVML value type unless it is unsigned int; here 3 = unsigned long long
 *
 * A call that no line matches returns NOT_SUPPORTED (nvmlShutdown: -1). A value may contain any byte except NUL, CR and LF.
 * To add a getter with one of the common signatures, add one line under "the getters with these signatures" below.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fnmatch.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { NO_LINE = -1, OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7,
       ARGUMENT_VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 64, MAX_LINES = 1000, MAX_NUMBERS = 16, TEXT_BYTES = 512, KEY_BYTES = 96 };

typedef const char *Device;
static const char devices[MAX_GPUS];
#define SYSTEM ((Device)0)

/* ---- the scenario ---- */

/* `literal`: length of the pattern before its first wildcard. `calls`: how many calls reached a line with `for` and `after`. */
static struct line { char *pattern, *value; size_t literal; int has_gpu, calls; } lines[MAX_LINES];
static int line_count;
static struct stat loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users; /* successful nvmlInit calls minus successful nvmlShutdown calls */

static void fail(const char *path, const char *why)
{
    fprintf(stderr, "nvml_stub: %s: %s\n", path, why);
    abort();
}

static void load(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = NULL;
    size_t size = 0;
    if (!file)
        fail(path, strerror(errno));
    while (getline(&text, &size, file) > 0) {
        text[strcspn(text, "\r\n")] = 0;
        char *equals = strchr(text, '=');
        if (text[0] == '#' || text[0] == 0)
            continue;
        if (!equals || line_count == MAX_LINES)
            fail(path, equals ? "too many lines" : text);
        *equals = 0;
        if (strcmp(text, "include") == 0) {
            char folder[PATH_MAX], other[2 * PATH_MAX];
            snprintf(folder, sizeof folder, "%s", path);
            if (equals[1] == '/')
                snprintf(other, sizeof other, "%s", equals + 1);
            else
                snprintf(other, sizeof other, "%s/%s", dirname(folder), equals + 1);
            load(other);
            continue;
        }
        lines[line_count++] = (struct line){
            .pattern = strdup(text),
            .value = strdup(equals + 1),
            .literal = strcspn(text, "*?["),
            .has_gpu = strncmp(text, "gpu.", 4) == 0,
        };
    }
    free(text);
    fclose(file);
}

static void load_if_changed(void)
{
    const char *path = getenv("RACKPROOF_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        fail(path ? path : "RACKPROOF_NVML_SCENARIO", path ? strerror(errno) : "not set");
    if (now.st_ino == loaded.st_ino && now.st_dev == loaded.st_dev && now.st_size == loaded.st_size &&
        now.st_mtim.tv_sec == loaded.st_mtim.tv_sec && now.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec)
        return;
    while (line_count > 0) {
        free(lines[--line_count].pattern);
        free(lines[line_count].value);
    }
    load(path);
    loaded = now;
}

/* Returns whether the key matches the line. Comparing up to the first wildcard rules out most lines without calling fnmatch. */
static int fits(const struct line *line, const char *key)
{
    return strncmp(line->pattern, key, line->literal) == 0 && fnmatch(line->pattern, key, 0) == 0;
}

/* Copies the value of the last matching line. Returns OK, the return code if the value is one (`!15`), or NO_LINE if no line
 * matches. A delay does not block other threads. */
static int answer(Device gpu, const char *key, char value[TEXT_BYTES])
{
    double delay = 0;
    int code = NO_LINE;
    char full[KEY_BYTES + 16] = "";
    if (gpu != SYSTEM)
        snprintf(full, sizeof full, "gpu.%d.%s", (int)(gpu - devices), key);
    pthread_mutex_lock(&lock);
    load_if_changed();
    for (int i = line_count - 1; i >= 0; i--) {
        if (!fits(&lines[i], lines[i].has_gpu ? full : key))
            continue;
        if (lines[i].value[0] == '~') {
            delay += strtod(lines[i].value + 1, NULL);
            continue;
        }
        int most, before;
        if (sscanf(lines[i].value, "!%d for %d after %d", &code, &most, &before) == 3) {
            int call = lines[i].calls++;
            if (call < before || call >= before + most) {
                code = NO_LINE;
                continue;
            }
        } else {
            code = lines[i].value[0] == '!' ? atoi(lines[i].value + 1) : OK;
        }
        snprintf(value, TEXT_BYTES, "%s", lines[i].value);
        break;
    }
    pthread_mutex_unlock(&lock);
    struct timespec pause = {(time_t)delay, (long)((delay - (double)(time_t)delay) * 1e9)};
    if (delay > 0)
        nanosleep(&pause, NULL);
    return code;
}

static int text(Device gpu, char *out, unsigned size, const char *key)
{
    char value[TEXT_BYTES];
    int code = users ? answer(gpu, key, value) : UNINITIALIZED;
    if (code != OK)
        return code == NO_LINE ? NOT_SUPPORTED : code;
    if (strlen(value) >= size)
        return INSUFFICIENT_SIZE;
    memcpy(out, value, strlen(value) + 1);
    return OK;
}

/* Parses the value of a key into `found`, sets the remaining elements to 0, and sets `count` to how many numbers the value has.
 * Returns what `answer` returns. `key` is a printf format, whose arguments come last. */
__attribute__((format(printf, 4, 5)))
static int numbers(Device gpu, unsigned long long found[MAX_NUMBERS], int *count, const char *key, ...)
{
    char full[KEY_BYTES], value[TEXT_BYTES], *rest = value, *end;
    va_list arguments;
    va_start(arguments, key);
    vsnprintf(full, sizeof full, key, arguments);
    va_end(arguments);
    int code = users ? answer(gpu, full, value) : UNINITIALIZED;
    if (code != OK)
        return code;
    memset(found, 0, MAX_NUMBERS * sizeof *found);
    for (*count = 0; *count < MAX_NUMBERS; ++*count, rest = end) {
        unsigned long long number = strtoull(rest, &end, 0);
        if (end == rest)
            break;
        found[*count] = number;
    }
    return OK;
}

/* ---- macros for the signatures that several NVML getters share ---- */

#define READ(gpu, ...)                               \
    unsigned long long n[MAX_NUMBERS];               \
    int count;                                       \
    int code = numbers(gpu, n, &count, __VA_ARGS__); \
    if (code != OK)                                  \
        return code == NO_LINE ? NOT_SUPPORTED : code;

#define TEXT(Name) \
    int nvmlDeviceGet##Name(Device gpu, char *out, unsigned size) { return text(gpu, out, size, #Name); }

#define NUMBER(Name, type) \
    int nvmlDeviceGet##Name(Device gpu, type *out) { READ(gpu, #Name) *out = (type)n[0]; return OK; }

#define PAIR(Name) \
    int nvmlDeviceGet##Name(Device gpu, unsigned *a, unsigned *b) \
    { READ(gpu, #Name) *a = (unsigned)n[0]; *b = (unsigned)n[1]; return OK; }

#define VERSIONED(Name) \
    int nvmlDeviceGet##Name(Device gpu, struct versioned *out) { READ(gpu, #Name) out->value = (unsigned)n[0]; return OK; }

#define CHOSEN(Name, type) \
    int nvmlDeviceGet##Name(Device gpu, unsigned which, type *out) \
    { READ(gpu, #Name ".%u", which) *out = (type)n[0]; return OK; }

struct versioned { unsigned version, value; };

/* ---- the getters with these signatures: one line each ---- */

TEXT(Name)
TEXT(Serial)
TEXT(UUID)
TEXT(VbiosVersion)
TEXT(BoardPartNumber)
TEXT(InforomImageVersion)
NUMBER(InforomConfigurationChecksum, unsigned)
NUMBER(Brand, unsigned)
NUMBER(Architecture, unsigned)
NUMBER(NumGpuCores, unsigned)
NUMBER(MemoryBusWidth, unsigned)
NUMBER(MinorNumber, unsigned)
NUMBER(ModuleId, unsigned)
NUMBER(BoardId, unsigned)
NUMBER(NumaNodeId, unsigned)
NUMBER(VirtualizationMode, unsigned)
NUMBER(ComputeMode, unsigned)
NUMBER(AccountingMode, unsigned)
NUMBER(PerformanceState, unsigned)
NUMBER(FanSpeed, unsigned)
NUMBER(PowerManagementLimit, unsigned)
NUMBER(GpuMaxPcieLinkGeneration, unsigned)
NUMBER(RetiredPagesPendingStatus, unsigned)
NUMBER(C2cModeInfoV, unsigned)
NUMBER(PowerUsage, unsigned)
NUMBER(EnforcedPowerLimit, unsigned)
NUMBER(PowerManagementDefaultLimit, unsigned)
NUMBER(TotalEnergyConsumption, unsigned long long)
NUMBER(CurrPcieLinkGeneration, unsigned)
NUMBER(MaxPcieLinkGeneration, unsigned)
NUMBER(CurrPcieLinkWidth, unsigned)
NUMBER(MaxPcieLinkWidth, unsigned)
NUMBER(PcieReplayCounter, unsigned)
NUMBER(PersistenceMode, unsigned)
NUMBER(CurrentClocksEventReasons, unsigned long long)
NUMBER(CurrentClocksThrottleReasons, unsigned long long)
PAIR(EccMode)
PAIR(MigMode)
PAIR(GspFirmwareMode)
PAIR(CudaComputeCapability)
PAIR(PowerManagementLimitConstraints)
VERSIONED(AddressingMode)
VERSIONED(MarginTemperature)
CHOSEN(TemperatureThreshold, unsigned)
CHOSEN(MaxClockInfo, unsigned)
CHOSEN(ApplicationsClock, unsigned)
CHOSEN(DefaultApplicationsClock, unsigned)
CHOSEN(NvLinkVersion, unsigned)
CHOSEN(Temperature, unsigned)
CHOSEN(ClockInfo, unsigned)
CHOSEN(NvLinkState, unsigned)
CHOSEN(NvLinkRemoteDeviceType, unsigned)

/* ---- the getters with a signature of their own ---- */

int nvmlDeviceGetTotalEccErrors(Device gpu, unsigned error, unsigned counter, unsigned long long *out)
{
    READ(gpu, "TotalEccErrors.%u.%u", error, counter)
    *out = n[0];
    return OK;
}

int nvmlDeviceGetMemoryErrorCounter(Device gpu, unsigned error, unsigned counter, unsigned place, unsigned long long *out)
{
    READ(gpu, "MemoryErrorCounter.%u.%u.%u", error, counter, place)
    *out = n[0];
    return OK;
}

int nvmlDeviceGetNvLinkErrorCounter(Device gpu, unsigned link, unsigned counter, unsigned long long *out)
{
    READ(gpu, "NvLinkErrorCounter.%u.%u", link, counter)
    *out = n[0];
    return OK;
}

struct sram { unsigned version; unsigned long long counts[11]; unsigned exceeded; };

int nvmlDeviceGetSramEccErrorStatus(Device gpu, struct sram *out) /* SramEccErrorStatus=1 if the threshold is exceeded, else 0 */
{
    READ(gpu, "SramEccErrorStatus")
    memset(out->counts, 0, sizeof out->counts);
    out->exceeded = (unsigned)n[0];
    return OK;
}

int nvmlDeviceGetUnrepairableMemoryFlag_v1(Device gpu, unsigned out[2]) /* ...=flag index: sets out[index]; default index: 0 */
{
    READ(gpu, "UnrepairableMemoryFlag_v1")
    out[n[1] & 1] = (unsigned)n[0];
    return OK;
}

int nvmlDeviceGetRepairStatus(Device gpu, unsigned out[3]) /* ...=channel tpc: 1 if that repair is pending, else 0 */
{
    READ(gpu, "RepairStatus")
    out[1] = (unsigned)n[0];
    out[2] = (unsigned)n[1];
    return OK;
}

int nvmlDeviceGetRowRemapperHistogram(Device gpu, unsigned out[5]) /* ...=max high partial low none: numbers of banks */
{
    READ(gpu, "RowRemapperHistogram")
    for (int i = 0; i < 5; i++)
        out[i] = (unsigned)n[i];
    return OK;
}

int nvmlDeviceGetRetiredPages(Device gpu, unsigned cause, unsigned *size, unsigned long long *out) /* ...=addresses */
{
    READ(gpu, "RetiredPages.%u", cause)
    unsigned room = *size;
    *size = (unsigned)count;
    if ((unsigned)count > room)
        return INSUFFICIENT_SIZE;
    memcpy(out, n, (size_t)count * sizeof *out);
    return OK;
}

int nvmlDeviceValidateInforom(Device gpu)
{
    READ(gpu, "ValidateInforom")
    return OK;
}

int nvmlDeviceGetGspFirmwareVersion(Device gpu, char *out)
{
    return text(gpu, out, 64, "GspFirmwareVersion");
}

struct bar1 { unsigned long long total, free, used; };

int nvmlDeviceGetBAR1MemoryInfo(Device gpu, struct bar1 *out) /* BAR1MemoryInfo=total used */
{
    READ(gpu, "BAR1MemoryInfo")
    *out = (struct bar1){n[0], n[0] - n[1], n[1]};
    return OK;
}

struct fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; };

struct fabric_v3 { struct fabric v2; unsigned char summary; };

/* GpuFabricInfoV=state status clique health summary cluster. Every byte of the cluster UUID is `cluster`. With a summary, the
 * call accepts only version 3 of the structure; with only the first four numbers, only version 2. */
int nvmlDeviceGetGpuFabricInfoV(Device gpu, struct fabric *out)
{
    READ(gpu, "GpuFabricInfoV")
    unsigned version = out->version;
    if (version != (count > 4 ? sizeof(struct fabric_v3) | 3 << 24 : sizeof *out | 2 << 24))
        return ARGUMENT_VERSION_MISMATCH;
    *out = (struct fabric){version, {0}, (unsigned)n[1], (unsigned)n[2], (unsigned)n[0], (unsigned)n[3]};
    memset(out->cluster, (int)n[5], sizeof out->cluster);
    if (count > 4)
        ((struct fabric_v3 *)out)->summary = (unsigned char)n[4];
    return OK;
}

int nvmlDeviceGetRemappedRows(Device gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    READ(gpu, "RemappedRows")
    *corrected = (unsigned)n[0];
    *uncorrected = (unsigned)n[1];
    *pending = (unsigned)n[2];
    *failed = (unsigned)n[3];
    return OK;
}

struct utilization { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(Device gpu, struct utilization *out)
{
    READ(gpu, "UtilizationRates")
    out->gpu = (unsigned)n[0];
    out->memory = (unsigned)n[1];
    return OK;
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(Device gpu, struct memory *out) /* MemoryInfo=total used */
{
    READ(gpu, "MemoryInfo")
    *out = (struct memory){n[0], n[0] - n[1], n[1]};
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };

static int address(Device gpu, struct pci *out, const char *key) /* ...=00000000:19:00.0 */
{
    memset(out, 0, sizeof *out);
    int code = text(gpu, out->address, sizeof out->address, key);
    if (code != OK)
        return code;
    sscanf(out->address, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->legacy, sizeof out->legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(Device gpu, struct pci *out)
{
    return address(gpu, out, "PciInfo");
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device gpu, unsigned link, struct pci *out)
{
    char key[KEY_BYTES];
    snprintf(key, sizeof key, "NvLinkRemotePciInfo.%u", link);
    return address(gpu, out, key);
}

int nvmlDeviceGetP2PStatus(Device gpu, Device peer, unsigned capability, unsigned *out)
{
    READ(gpu, "P2PStatus.%d.%u", (int)(peer - devices), capability)
    *out = (unsigned)n[0];
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(Device gpu, Device peer, unsigned *out)
{
    READ(gpu, "TopologyCommonAncestor.%d", (int)(peer - devices))
    *out = (unsigned)n[0];
    return OK;
}

struct field {
    unsigned id, scope;
    long long at, took;
    unsigned type;
    int code;
    union { unsigned number; unsigned long long wide; int small; double real; } value;
};

enum { UNSIGNED_INT = 1, SIGNED_INT = 5 };

/* `FieldValues=0` lets the call succeed. The lines `FieldValues.FIELD` and `FieldValues.FIELD.SCOPE` have the value and type of a
 * field, or its return code. */
int nvmlDeviceGetFieldValues(Device gpu, int size, struct field *out)
{
    READ(gpu, "FieldValues")
    for (int i = 0; i < size; i++) {
        out[i].code = numbers(gpu, n, &count, "FieldValues.%u.%u", out[i].id, out[i].scope);
        if (out[i].code == NO_LINE)
            out[i].code = numbers(gpu, n, &count, "FieldValues.%u", out[i].id);
        out[i].value.wide = ~0ull; /* the value of a failed field is undefined */
        if (out[i].code == NO_LINE)
            out[i].code = NOT_SUPPORTED;
        if (out[i].code != OK)
            continue;
        out[i].type = count > 1 ? (unsigned)n[1] : UNSIGNED_INT;
        if (out[i].type == UNSIGNED_INT)
            out[i].value.number = (unsigned)n[0];
        else if (out[i].type == SIGNED_INT)
            out[i].value.small = (int)(long long)n[0];
        else
            out[i].value.wide = n[0];
    }
    return OK;
}

struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(Device gpu, unsigned *size, struct process *out) /* ...=PIDs */
{
    READ(gpu, "ComputeRunningProcesses")
    unsigned room = *size;
    *size = (unsigned)count;
    if ((unsigned)count > room)
        return INSUFFICIENT_SIZE;
    for (int i = 0; i < count; i++)
        out[i] = (struct process){(unsigned)n[i], 1 << 20, ~0u, ~0u};
    return OK;
}

/* ---- GPM: the utilization of a GPU between two samples ---- */

struct sample { Device gpu; struct timespec at; };
struct support { unsigned version, supported; };
struct metric { unsigned id; int code; double value; const char *name, *long_name, *unit; };
struct metrics { unsigned version, size; struct sample *first, *second; struct metric of[]; };

int nvmlGpmQueryDeviceSupport(Device gpu, struct support *out) /* GpmSupport=1 */
{
    READ(gpu, "GpmSupport")
    out->supported = (unsigned)n[0];
    return OK;
}

int nvmlGpmSampleAlloc(struct sample **out)
{
    *out = calloc(1, sizeof **out);
    return OK;
}

int nvmlGpmSampleFree(struct sample *sample)
{
    free(sample);
    return OK;
}

int nvmlGpmSampleGet(Device gpu, struct sample *out) /* GpmSample=0 lets the call succeed */
{
    READ(gpu, "GpmSample")
    out->gpu = gpu;
    clock_gettime(CLOCK_MONOTONIC, &out->at);
    return OK;
}

/* GpmMetric.5=62.5: the value of metric 5, or its return code. Both samples must be of one GPU and at least 100 ms apart. */
int nvmlGpmMetricsGet(struct metrics *all)
{
    char key[KEY_BYTES], value[TEXT_BYTES];
    if (!users)
        return UNINITIALIZED;
    if (all->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    double apart = (double)(all->second->at.tv_sec - all->first->at.tv_sec) +
                   (double)(all->second->at.tv_nsec - all->first->at.tv_nsec) / 1e9;
    if (all->first->gpu != all->second->gpu || apart < 0.1)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < all->size; i++) {
        snprintf(key, sizeof key, "GpmMetric.%u", all->of[i].id);
        int code = answer(all->first->gpu, key, value);
        all->of[i].code = code == NO_LINE ? NOT_SUPPORTED : code;
        all->of[i].value = code == OK ? strtod(value, NULL) : 0;
    }
    return OK;
}

/* ---- the system ---- */

int nvmlInitWithFlags(unsigned flags)
{
    char value[TEXT_BYTES];
    (void)flags;
    int code = answer(SYSTEM, "Init", value);
    if (code == NO_LINE)
        return NOT_SUPPORTED;
    if (code == OK)
        __atomic_add_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return code;
}

int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
    char value[TEXT_BYTES];
    int code = users ? answer(SYSTEM, "Shutdown", value) : UNINITIALIZED;
    if (code == OK)
        __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return code;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "An error code that only the stub returns";
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    return text(SYSTEM, out, size, "DriverVersion");
}

int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    READ(SYSTEM, "CudaDriverVersion")
    *out = (int)n[0];
    return OK;
}

struct confidential { unsigned environment, feature, tools; };

int nvmlSystemGetConfComputeState(struct confidential *out) /* ConfComputeState=feature */
{
    READ(SYSTEM, "ConfComputeState")
    *out = (struct confidential){0, (unsigned)n[0], 0};
    return OK;
}

int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size)
{
    char key[KEY_BYTES];
    snprintf(key, sizeof key, "ProcessName.%u", pid);
    return text(SYSTEM, out, size, key);
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
    READ(SYSTEM, "Count")
    *out = (unsigned)n[0];
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out)
{
    unsigned present;
    int found = nvmlDeviceGetCount_v2(&present);
    if (found != OK)
        return found;
    if (index >= present || index >= MAX_GPUS)
        return INVALID_ARGUMENT;
    READ(&devices[index], "HandleByIndex")
    *out = &devices[index];
    return OK;
}
