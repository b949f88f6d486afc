/* A stand-in for the driver's management library: our own small libnvidia-ml.so.1.

   What it says stands in the text file $NVML_STANDIN, read again whenever it was written:

     init 0                      result of nvmlInit, and of every other call
     load 1                      counts how often the driver was loaded: a process that began under another load
                                 is answered UNINITIALIZED until it ends
     driver 580.65.06            driver version
     cuda 13000                  newest CUDA of the driver
     card UUID BUS MIB NAME      a card, in index order; the lines below are of this card
     mig SLOT GI CI UUID MIB NAME    an instance of the last card; the lines below are of this instance
       split 0|1                 MIG mode; without this line the card has none
       addressing MODE           how its addresses are made: 1 HMM, 2 ATS; without this line it does not say
       memory RESERVED USED      MiB; `used` is what no process is listed for
       utilization GPU MEMORY    %
       temperature NOW SLOWDOWN  degrees Celsius
       power NOW LIMIT           mW
       compute|graphics|mps PID MIB    a process; MIB -1: the driver does not tell
       fault VALUE CODE          this value answers with this error; `handle` means every call
       hang VALUE SECONDS        this value answers late

   A process that lost a card does not find it again; a new one does.
   Process lists follow the true two-call protocol: asked with too little room, NVML_ERROR_INSUFFICIENT_SIZE. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL, LOST = 15, VERSION = 25 };
enum { CARDS = 128, MANY = 64, NO_INSTANCE = 0xffffffffu };
typedef unsigned long long u64;
#define UNTOLD (~0ULL)
#define MIB(n) ((u64)(n) << 20)

typedef struct { char legacy[16]; unsigned ids[5]; char bus[32]; } pci_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned version, value; } addressing_t;
typedef struct { unsigned version; int sensor, now; } temperature_t;
typedef struct { char value[24]; int code, seconds; } fault_t;
typedef struct {
  char uuid[96], bus[32], name[96];
  int parent, slot, split, addressing; /* parent: -1 for a card; split and addressing: -1 for "does not say" */
  unsigned gpu_instance, compute_instance;
  u64 total, reserved, used;
  unsigned load[2], heat[2], power[2];
  process_t processes[3][MANY];
  unsigned counts[3];
  fault_t faults[MANY];
  int n_faults;
} card_t;

static struct { int init, load, cuda, n; char driver[80]; card_t cards[CARDS]; } state;
static struct handle { char uuid[96]; int lost; } handles[4 * CARDS]; /* a handle stays with its card */
static int n_handles, load_at_init;
static const char *const LISTS[3] = {"compute", "graphics", "mps"};

static void add_process(card_t *card, int list, unsigned pid, long mib) {
  u64 used = mib < 0 ? UNTOLD : MIB(mib);
  card->processes[list][card->counts[list]++] = (process_t){pid, used, card->gpu_instance, card->compute_instance};
}

static void read_card_line(card_t *card, const char *line) {
  unsigned a, b;
  long mib;
  fault_t *fault = &card->faults[card->n_faults];
  if (sscanf(line, " memory %u %u", &a, &b) == 2) card->reserved = MIB(a), card->used = MIB(b);
  sscanf(line, " split %d", &card->split);
  sscanf(line, " addressing %d", &card->addressing);
  sscanf(line, " utilization %u %u", &card->load[0], &card->load[1]);
  sscanf(line, " temperature %u %u", &card->heat[0], &card->heat[1]);
  sscanf(line, " power %u %u", &card->power[0], &card->power[1]);
  if (sscanf(line, " fault %23s %d", fault->value, &fault->code) == 2) card->n_faults++;
  else if (sscanf(line, " hang %23s %d", fault->value, &fault->seconds) == 2) card->n_faults++;
  for (int list = 0; list < 3; list++) {
    char format[32];
    snprintf(format, sizeof format, " %s %%u %%ld", LISTS[list]);
    if (sscanf(line, format, &a, &mib) == 2) add_process(card, list, a, mib);
  }
}

/* Whether this line begins a card or an instance. */
static int begins(card_t *card, int n, const char *line) {
  unsigned mib;
  card->parent = card->split = card->addressing = -1;
  card->gpu_instance = card->compute_instance = NO_INSTANCE;
  if (sscanf(line, "mig %d %u %u %95s %u %95[^\n]", &card->slot, &card->gpu_instance, &card->compute_instance,
             card->uuid, &mib, card->name) == 6) {
    for (card->parent = n - 1; state.cards[card->parent].parent >= 0; card->parent--);
    card->total = MIB(mib);
    return 1;
  }
  card->total = 0;
  if (sscanf(line, "card %95s %31s %u %95[^\n]", card->uuid, card->bus, &mib, card->name) == 4) card->total = MIB(mib);
  return card->total > 0;
}

static int unchanged(const char *path) {
  static struct timespec at;
  static ino_t inode;
  struct stat now;
  if (!path || stat(path, &now)) return 0;
  int same = now.st_ino == inode && now.st_mtim.tv_sec == at.tv_sec && now.st_mtim.tv_nsec == at.tv_nsec;
  at = now.st_mtim, inode = now.st_ino;
  return same;
}

/* Reads the file if it is new; the error that every call answers now. */
static int load(void) {
  char line[512];
  const char *path = getenv("NVML_STANDIN");
  if (!unchanged(path)) {
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(&state, 0, sizeof state);
    while (file && fgets(line, sizeof line, file)) {
      sscanf(line, "init %d", &state.init);
      sscanf(line, "load %d", &state.load);
      sscanf(line, "driver %79s", state.driver);
      sscanf(line, "cuda %d", &state.cuda);
      if (begins(&state.cards[state.n], state.n, line)) state.n++;
      else if (state.n) read_card_line(&state.cards[state.n - 1], line);
    }
    if (file) fclose(file);
  }
  return state.init ? state.init : load_at_init && state.load != load_at_init ? UNINITIALIZED : SUCCESS;
}

static card_t *find(const char *uuid) {
  for (int i = 0; i < state.n; i++)
    if (!strcasecmp(state.cards[i].uuid, uuid)) return &state.cards[i];
  return NULL;
}

/* The error or delay that the file gives to this value of this card. */
static int faulty(card_t *card, const char *value) {
  for (int i = 0; i < card->n_faults; i++) {
    fault_t *fault = &card->faults[i];
    if (strcmp(fault->value, value) && strcmp(fault->value, "handle")) continue;
    if (fault->seconds) sleep(fault->seconds);
    if (fault->code) return fault->code;
  }
  return SUCCESS;
}

static int remember(struct handle *handle, int error) {
  handle->lost |= error == LOST;
  return handle->lost ? LOST : error;
}

/* An instance answers for itself only what it has for itself. */
static int whole_only(const char *value) {
  static const char *const own[] = {"uuid", "place", "name", "memory", "memory_v2", "compute", "graphics", "mps"};
  for (unsigned i = 0; i < sizeof own / sizeof *own; i++)
    if (!strcmp(own[i], value)) return 0;
  return 1;
}

static int ask(struct handle *handle, const char *value, card_t **card) {
  int error = load();
  if (error) return error;
  *card = find(handle->uuid);
  error = remember(handle, *card ? faulty(*card, value) : LOST);
  if (error) return error;
  if (!strcmp(value, "utilization") && ((*card)->split == 1 || (*card)->parent >= 0)) return NOT_SUPPORTED;
  return (*card)->parent >= 0 && whole_only(value) ? INVALID : SUCCESS;
}

#define ASK(value) card_t *card; int error = ask(handle, value, &card); if (error) return error

int nvmlInitWithFlags(unsigned flags) { (void)flags; load_at_init = 0; int error = load(); load_at_init = state.load; return error; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "the stand-in's own error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { int error = load(); snprintf(text, size, "%s", state.driver); return error; }
int nvmlSystemGetCudaDriverVersion(int *version) { int error = load(); *version = state.cuda; return error; }
int nvmlDeviceGetCount_v2(unsigned *count) {
  int error = load();
  *count = 0;
  for (int i = 0; i < state.n; i++) *count += state.cards[i].parent < 0;
  return error;
}

static struct handle *handle_of(const char *uuid) {
  for (int i = 0; i < n_handles; i++)
    if (!strcasecmp(handles[i].uuid, uuid)) return &handles[i];
  struct handle *handle = &handles[n_handles < 4 * CARDS - 1 ? n_handles++ : n_handles];
  snprintf(handle->uuid, sizeof handle->uuid, "%s", uuid);
  handle->lost = 0;
  return handle;
}
static int open_card(card_t *card, struct handle **handle) {
  *handle = handle_of(card->uuid);
  return remember(*handle, faulty(card, "handle"));
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **handle) {
  int error = load();
  if (error) return error;
  for (int i = 0; i < state.n; i++)
    if (state.cards[i].parent < 0 && !index--) return open_card(&state.cards[i], handle);
  return INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **handle) {
  int error = load();
  if (error) return error;
  card_t *card = find(uuid);
  return card ? open_card(card, handle) : NOT_FOUND;
}
int nvmlDeviceGetMigDeviceHandleByIndex(struct handle *handle, unsigned slot, struct handle **instance) {
  ASK("mig");
  for (card_t *other = card; other < state.cards + state.n; other++)
    if (other->parent == card - state.cards && other->slot == (int)slot) return open_card(other, instance);
  return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(struct handle *handle, unsigned *id) { ASK("place"); *id = card->gpu_instance; return card->parent < 0 ? INVALID : SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct handle *handle, unsigned *id) { ASK("place"); *id = card->compute_instance; return card->parent < 0 ? INVALID : SUCCESS; }
int nvmlDeviceGetMaxMigDeviceCount(struct handle *handle, unsigned *count) { ASK("mig"); *count = card->split == 1 ? 7 : 0; return SUCCESS; }

int nvmlDeviceGetUUID(struct handle *handle, char *text, unsigned size) { ASK("uuid"); snprintf(text, size, "%s", card->uuid); return SUCCESS; }
int nvmlDeviceGetName(struct handle *handle, char *text, unsigned size) { ASK("name"); snprintf(text, size, "%s", card->name); return SUCCESS; }
int nvmlDeviceGetPciInfo_v3(struct handle *handle, pci_t *pci) {
  ASK("pci");
  memset(pci, 0, sizeof *pci);
  memcpy(pci->bus, card->bus, sizeof pci->bus - 1);
  return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(struct handle *handle, int *major, int *minor) { ASK("capability"); *major = 8, *minor = 6; return SUCCESS; }
int nvmlDeviceGetComputeMode(struct handle *handle, unsigned *mode) { ASK("mode"); *mode = 0; return SUCCESS; }
int nvmlDeviceGetMigMode(struct handle *handle, unsigned *now, unsigned *pending) {
  ASK("mig");
  *now = *pending = card->split == 1;
  return card->split < 0 ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetAddressingMode(struct handle *handle, addressing_t *mode) {
  ASK("addressing");
  mode->value = card->addressing;
  return mode->version != 0x1000008 ? VERSION : card->addressing < 0 ? NOT_SUPPORTED : SUCCESS;
}

/* The first instance of a card, or the one after another; NULL when there is none (left). */
static card_t *instance_after(card_t *card, card_t *last) {
  for (card_t *next = last + 1; next < state.cards + state.n; next++)
    if (next->parent == card - state.cards) return next;
  return NULL;
}

static u64 used_bytes(card_t *card) {
  u64 used = card->used;
  for (card_t *part = instance_after(card, card); part; part = instance_after(card, part)) used += used_bytes(part);
  for (int list = 0; list < 3; list++)
    for (unsigned i = 0; i < card->counts[list]; i++)
      used += card->processes[list][i].used == UNTOLD ? 0 : card->processes[list][i].used;
  return used;
}
int nvmlDeviceGetMemoryInfo(struct handle *handle, memory_t *memory) {
  ASK("memory");
  memory->total = card->total, memory->used = used_bytes(card) + card->reserved, memory->free = card->total - memory->used;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(struct handle *handle, memory_v2_t *memory) {
  ASK("memory");
  if (faulty(card, "memory_v2")) return faulty(card, "memory_v2");
  if (memory->version != 0x2000028) return VERSION;
  memory->total = card->total, memory->reserved = card->reserved, memory->used = used_bytes(card);
  memory->free = card->total - memory->used - memory->reserved;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct handle *handle, unsigned rates[2]) { ASK("utilization"); memcpy(rates, card->load, sizeof card->load); return SUCCESS; }
int nvmlDeviceGetTemperature(struct handle *handle, int sensor, unsigned *now) { (void)sensor; ASK("temperature"); *now = card->heat[0]; return SUCCESS; }
int nvmlDeviceGetTemperatureV(struct handle *handle, temperature_t *sample) {
  ASK("temperature");
  if (faulty(card, "temperature_v")) return faulty(card, "temperature_v");
  sample->now = card->heat[0];
  return sample->version != 0x100000c ? VERSION : SUCCESS;
}
int nvmlDeviceGetTemperatureThreshold(struct handle *handle, int which, unsigned *limit) { (void)which; ASK("slowdown"); *limit = card->heat[1]; return SUCCESS; }
int nvmlDeviceGetPowerUsage(struct handle *handle, unsigned *now) { ASK("power"); *now = card->power[0]; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(struct handle *handle, unsigned *limit) { ASK("limit"); *limit = card->power[1]; return SUCCESS; }
int nvmlDeviceGetFanSpeed(struct handle *handle, unsigned *percent) { ASK("fan"); *percent = 30; return SUCCESS; }
int nvmlDeviceGetClockInfo(struct handle *handle, int which, unsigned *mhz) { ASK("clocks"); *mhz = which == 2 ? 9501 : 1695; return SUCCESS; }
int nvmlDeviceGetPerformanceState(struct handle *handle, unsigned *pstate) { ASK("pstate"); *pstate = 2; return SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(struct handle *handle, u64 *bits) { ASK("reasons"); *bits = 0x1 | 0x4; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(struct handle *handle, int type, int counter, u64 *count) { (void)type, (void)counter; ASK("ecc"); *count = 0; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(struct handle *handle, unsigned *gen) { ASK("pcie"); *gen = 4; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(struct handle *handle, unsigned *width) { ASK("pcie"); *width = 16; return SUCCESS; }

/* Of a split card, with its instances' own: what the driver tells those who may see all. */
static unsigned all_of(card_t *card, int which, process_t *all) {
  unsigned n = card->counts[which];
  memcpy(all, card->processes[which], n * sizeof *all);
  for (card_t *part = instance_after(card, card); part; part = instance_after(card, part)) n += all_of(part, which, all + n);
  return n;
}
static int list(struct handle *handle, int which, unsigned *room, process_t *out) {
  ASK(LISTS[which]);
  process_t all[8 * MANY];
  unsigned n = all_of(card, which, all), fits = *room >= n && (out || !n);
  *room = n;
  if (!fits) return TOO_SMALL;
  if (n) memcpy(out, all, n * sizeof *out);
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 0, room, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 1, room, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 2, room, out); }
