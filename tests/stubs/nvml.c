/* A stand-in for the driver's management library: our own small libnvidia-ml.so.1.

   What it says stands in the text file $NVML_STANDIN, read again at every call:

     init 0                      result of nvmlInit
     driver 580.65.06            driver version
     cuda 13000                  newest CUDA of the driver
     card UUID BUS MIB NAME      a card, in index order; the lines below are of this card
       memory RESERVED USED      MiB; `used` is what no process is listed for
       utilization GPU MEMORY    %
       temperature NOW SLOWDOWN  degrees Celsius
       power NOW LIMIT           mW
       compute|graphics|mps PID MIB    a process; MIB -1: the driver does not tell
       fault VALUE CODE          this value answers with this error; `handle` means every call
       hang VALUE SECONDS        this value answers late

   Process lists follow the true two-call protocol: asked with too little room, NVML_ERROR_INSUFFICIENT_SIZE. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL, LOST = 15, CARDS = 64, MANY = 64 };
typedef unsigned long long u64;
#define UNTOLD (~0ULL)
#define MIB(n) ((u64)(n) << 20)

typedef struct { char legacy[16]; unsigned ids[5]; char bus[32]; } pci_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { char value[24]; int code, seconds; } fault_t;
typedef struct {
  char uuid[96], bus[32], name[96];
  u64 total, reserved, used;
  unsigned load[2], heat[2], power[2];
  process_t processes[3][MANY];
  unsigned counts[3];
  fault_t faults[MANY];
  int n_faults;
} card_t;

static struct { int init, cuda, n; char driver[80]; card_t cards[CARDS]; } state;
static struct handle { char uuid[96]; } handles[CARDS];
static const char *const LISTS[3] = {"compute", "graphics", "mps"};

static void add_process(card_t *card, int list, unsigned pid, long mib) {
  process_t *entry = &card->processes[list][card->counts[list]++];
  entry->pid = pid;
  entry->used = mib < 0 ? UNTOLD : MIB(mib);
}

static void read_card_line(card_t *card, const char *line) {
  unsigned a, b;
  long mib;
  fault_t *fault = &card->faults[card->n_faults];
  if (sscanf(line, " memory %u %u", &a, &b) == 2) card->reserved = MIB(a), card->used = MIB(b);
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

static void load(void) {
  char line[512];
  const char *path = getenv("NVML_STANDIN");
  FILE *file = path ? fopen(path, "r") : NULL;
  memset(&state, 0, sizeof state);
  while (file && fgets(line, sizeof line, file)) {
    card_t *card = &state.cards[state.n];
    unsigned mib;
    sscanf(line, "init %d", &state.init);
    sscanf(line, "driver %79s", state.driver);
    sscanf(line, "cuda %d", &state.cuda);
    if (sscanf(line, "card %95s %31s %u %95[^\n]", card->uuid, card->bus, &mib, card->name) == 4)
      card->total = MIB(mib), state.n++;
    else if (state.n) read_card_line(&state.cards[state.n - 1], line);
  }
  if (file) fclose(file);
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

static int ask(struct handle *handle, const char *value, card_t **card) {
  load();
  if (state.init) return state.init;
  *card = find(handle->uuid);
  return *card ? faulty(*card, value) : LOST;
}

#define ASK(value) card_t *card; int error = ask(handle, value, &card); if (error) return error

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return state.init; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "the stand-in's own error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { load(); snprintf(text, size, "%s", state.driver); return state.init; }
int nvmlSystemGetCudaDriverVersion(int *version) { load(); *version = state.cuda; return state.init; }
int nvmlDeviceGetCount_v2(unsigned *count) { load(); *count = state.n; return state.init; }

static int open_card(int index, struct handle **handle) {
  int error = faulty(&state.cards[index], "handle");
  *handle = &handles[index];
  snprintf(handles[index].uuid, sizeof handles[index].uuid, "%s", state.cards[index].uuid);
  return error;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **handle) {
  load();
  if (state.init) return state.init;
  return (int)index < state.n ? open_card(index, handle) : INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **handle) {
  load();
  if (state.init) return state.init;
  card_t *card = find(uuid);
  return card ? open_card(card - state.cards, handle) : NOT_FOUND;
}

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
int nvmlDeviceGetMigMode(struct handle *handle, unsigned *now, unsigned *pending) { ASK("mig"); (void)now, (void)pending; return NOT_SUPPORTED; }

static u64 used_bytes(card_t *card) {
  u64 used = card->used;
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
  memory->total = card->total, memory->reserved = card->reserved, memory->used = used_bytes(card);
  memory->free = card->total - memory->used - memory->reserved;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct handle *handle, unsigned rates[2]) { ASK("utilization"); memcpy(rates, card->load, sizeof card->load); return SUCCESS; }
int nvmlDeviceGetTemperature(struct handle *handle, int sensor, unsigned *now) { (void)sensor; ASK("temperature"); *now = card->heat[0]; return SUCCESS; }
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

static int list(struct handle *handle, int which, unsigned *room, process_t *out) {
  ASK(LISTS[which]);
  unsigned n = card->counts[which], fits = *room >= n && (out || !n);
  *room = n;
  if (!fits) return TOO_SMALL;
  if (n) memcpy(out, card->processes[which], n * sizeof *out);
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 0, room, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 1, room, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct handle *handle, unsigned *room, process_t *out) { return list(handle, 2, room, out); }
