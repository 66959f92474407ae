/* An emulated libnvidia-ml.so.1. Its devices and their errors are lines of the file that $EMULATED_NVML names:
 *
 *   devices 2        how many there are
 *   ecc 1 3          device 1 has counted 3 uncorrected memory errors
 *   xid 0 79         device 0 has reported XID 79
 *   lost 0           the driver has lost device 0
 *
 * Lines are added while programs run. Of the real library it has the functions below, with their types and errors.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999, MAX_DEVICES = 16 };
static const unsigned long long XID_CRITICAL = 8;

struct device {
  int number, registered;
};
struct event {
  struct device *device;
  unsigned long long type, data;
  unsigned int gpu_instance, compute_instance;
};
struct memory {
  unsigned long long total, free, used;
};

static struct device devices[MAX_DEVICES];
static int told; /* lines with an XID that were waited for */

/* Calls `take` with each line of the file, split into its words. Returns 0 if there is no file. */
static int each_line(void (*take)(const char *, long, long, void *), void *what) {
  const char *path = getenv("EMULATED_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return 0;
  char line[128], word[16];
  while (fgets(line, sizeof line, file)) {
    long one = -1, other = -1;
    if (strchr(line, '\n') && sscanf(line, "%15s %ld %ld", word, &one, &other) >= 2) take(word, one, other, what);
  }
  fclose(file);
  return 1;
}

struct facts {
  long devices, device, ecc, lost, xids, wanted, xid_device, xid;
};

static void learn(const char *word, long one, long other, void *what) {
  struct facts *facts = what;
  if (!strcmp(word, "devices")) facts->devices = one;
  if (!strcmp(word, "ecc") && one == facts->device) facts->ecc = other;
  if (!strcmp(word, "lost") && one == facts->device) facts->lost = 1;
  if (!strcmp(word, "xid") && facts->xids++ == facts->wanted) facts->xid_device = one, facts->xid = other;
}

static struct facts look(int device) {
  struct facts facts = {.device = device, .wanted = told, .xid_device = -1};
  each_line(learn, &facts);
  return facts;
}

int nvmlInitWithFlags(unsigned int flags) {
  struct facts facts = look(0);
  for (int i = 0; i < MAX_DEVICES; i++) devices[i].number = i;
  return facts.devices ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
  *count = (unsigned int)look(0).devices;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device) {
  if (index >= (unsigned int)look(0).devices || index >= MAX_DEVICES) return NOT_FOUND;
  *device = &devices[index];
  return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int length) {
  snprintf(uuid, length, "GPU-emulated-%d", device->number);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
  if (look(device->number).lost) return GPU_IS_LOST;
  *memory = (struct memory){.total = 1ull << 30, .free = 1ull << 29, .used = 1ull << 29};
  return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct device *device, int kind, int counter, unsigned long long *count) {
  struct facts facts = look(device->number);
  if (facts.lost) return GPU_IS_LOST;
  *count = (unsigned long long)facts.ecc;
  return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
  *set = &told;
  return SUCCESS;
}

int nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, void *set) {
  device->registered = types == XID_CRITICAL && set == &told;
  return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned int milliseconds) {
  const struct timespec moment = {.tv_nsec = 10000000};
  for (unsigned int waited = 0;; waited += 10) {
    struct facts facts = look(0);
    if (facts.xid_device >= 0) {
      told++;
      if (facts.xid_device < MAX_DEVICES && devices[facts.xid_device].registered) {
        *event = (struct event){&devices[facts.xid_device], XID_CRITICAL, (unsigned long long)facts.xid, ~0u, ~0u};
        return SUCCESS;
      }
    }
    if (waited >= milliseconds) return TIMEOUT;
    nanosleep(&moment, NULL);
  }
}
