// Devices, contexts, streams and events.

#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { kMostDevices = 16, kMostProcesses = 256 };

// ------------------------------------------------------------------------------------------------ the log

void sim_log(const char* kind, const char* what) {
  if (strcmp(kind, "refused") == 0) {
    fprintf(stderr, "simulated CANN: %s is not simulated\n", what);
  }
  const char* path = getenv("CANN_SIM_LOG");
  if (!path) {
    return;
  }
  char line[512];
  int length = snprintf(line, sizeof line, "%s %s\n", kind, what);
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file >= 0) {
    if (write(file, line, (size_t)length) != length) {
      perror("simulated CANN: CANN_SIM_LOG");
    }
    close(file);
  }
}

// What rlcore's plugin asks the library that is loaded as CANN: only a stand-in has an answer.

const char* rlcore_simulation(void) {
  return "simulated CANN";
}

const char* rlcore_simulation_log(void) {
  const char* path = getenv("CANN_SIM_LOG");
  return path ? path : "";
}

// ------------------------------------------------------------------------------------------------ what is there

static int from_env(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static int num_physical(void) {
  int wanted = from_env("CANN_SIM_DEVICES", 2);
  return wanted > kMostDevices ? kMostDevices : wanted;
}

int64_t sim_total_bytes(void) {
  return (int64_t)from_env("CANN_SIM_MIB", 4096) << 20;
}

// ASCEND_RT_VISIBLE_DEVICES: ids in rising order; the first that is none, or falls, ends the list.
static int visible(int* ids) {
  const char* value = getenv("ASCEND_RT_VISIBLE_DEVICES");
  int count = 0;
  if (!value) {
    for (; count < num_physical(); ++count) {
      ids[count] = count;
    }
    return count;
  }
  while (*value) {
    char* end;
    long id = strtol(value, &end, 10);
    int is_end = end == value || (*end && *end != ',');
    if (is_end || id < 0 || id >= num_physical() || (count && id <= ids[count - 1])) {
      break;
    }
    ids[count++] = (int)id;
    value = *end ? end + 1 : end;
  }
  return count;
}

int sim_num_visible(void) {
  int ids[kMostDevices];
  return visible(ids);
}

int sim_physical(int device) {
  int ids[kMostDevices];
  return device >= 0 && device < visible(ids) ? ids[device] : -1;
}

// ------------------------------------------------------------------------------------------------ books of memory

typedef struct {
  int pid;
  int64_t bytes[kMostDevices];
} Row;

static Row* rows(void) {
  static Row* mapped;
  if (!mapped) {
    char path[64];
    snprintf(path, sizeof path, "/dev/shm/cann_sim-%u", getuid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Row) * kMostProcesses) != 0) {
      perror(path);
      abort();
    }
    mapped = mmap(NULL, sizeof(Row) * kMostProcesses, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  }
  return mapped;
}

static int is_alive(int pid) {
  return pid && (pid == getpid() || kill(pid, 0) == 0);
}

static Row* my_row(void) {
  static Row* mine;
  if (mine && mine->pid == getpid()) {
    return mine;
  }
  Row* all = rows();
  for (int i = 0; i < kMostProcesses; ++i) {
    int before = all[i].pid;
    if (!is_alive(before) && __sync_bool_compare_and_swap(&all[i].pid, before, getpid())) {
      memset(all[i].bytes, 0, sizeof all[i].bytes);
      return mine = &all[i];
    }
  }
  fprintf(stderr, "simulated CANN: more than %d processes\n", kMostProcesses);
  abort();
}

void sim_count_bytes(int device, int64_t bytes) {
  __sync_fetch_and_add(&my_row()->bytes[sim_physical(device)], bytes);
}

int64_t sim_used_bytes(int device) {
  int64_t used = 0;
  int physical = sim_physical(device);
  for (int i = 0; i < kMostProcesses; ++i) {
    if (is_alive(rows()[i].pid)) {
      used += rows()[i].bytes[physical];
    }
  }
  return used;
}

// ------------------------------------------------------------------------------------------------ devices, contexts

static __thread int current = -1;
static int contexts[kMostDevices];  // a context is the address of its device's entry

int sim_current_device(void) {
  return current;
}

aclError aclInit(const char* config) {
  (void)config;
  return kSuccess;
}

aclError aclFinalize(void) {
  return kSuccess;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = (uint32_t)sim_num_visible();
  return kSuccess;
}

aclError aclrtSetDevice(int32_t device) {
  if (sim_physical(device) < 0) {
    return kInvalidDevice;
  }
  contexts[device] = device;
  current = device;
  return kSuccess;
}

aclError aclrtResetDevice(int32_t device) {
  return sim_physical(device) < 0 ? kInvalidDevice : kSuccess;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current < 0) {
    return kNoContext;
  }
  *device = current;
  return kSuccess;
}

aclError aclrtGetCurrentContext(void** context) {
  if (current < 0) {
    return kNoContext;
  }
  *context = &contexts[current];
  return kSuccess;
}

aclError aclrtSetCurrentContext(void* context) {
  current = *(int*)context;
  return kSuccess;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags) {
    *flags = 0;
  }
  *active = device == current;
  return kSuccess;
}

aclError aclrtSynchronizeDevice(void) {
  return kSuccess;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  (void)timeout_ms;
  return kSuccess;
}

const char* aclrtGetSocName(void) {
  return "Ascend910B1";
}

aclError aclrtDeviceGetUuid(int32_t device, char* uuid) {
  if (sim_physical(device) < 0) {
    return kInvalidDevice;
  }
  memset(uuid, 0, 16);
  memcpy(uuid, "CANN-SIM", 8);
  uuid[15] = (char)(sim_physical(device) + 1);
  return kSuccess;
}

aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logic) {
  *logic = sim_physical(user);
  return *logic < 0 ? kInvalidDevice : kSuccess;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  *can = device != peer && sim_physical(device) >= 0 && sim_physical(peer) >= 0;
  return kSuccess;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
  (void)flags;
  return sim_physical(peer) < 0 ? kInvalidDevice : kSuccess;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return kSuccess;
}

// Cores of an Ascend 910B1, which an operator library would ask for.
aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t* value) {
  (void)device;
  *value = attribute == 1 ? 24 : attribute == 101 ? 48 : 0;
  return kSuccess;
}

aclError aclGetDeviceCapability(uint32_t device, int info, int64_t* value) {
  (void)device;
  *value = info == 1 ? 48 : 24;
  return kSuccess;
}

aclError aclrtGetDeviceResLimit(int32_t device, int type, uint32_t* value) {
  (void)device;
  *value = type == 0 ? 24 : 48;
  return kSuccess;
}

// ------------------------------------------------------------------------------------------------ streams

typedef struct {
  int id;
} Stream;

static aclError new_stream(void** stream) {
  static int ids;
  Stream* made = malloc(sizeof *made);
  made->id = __sync_add_and_fetch(&ids, 1);
  *stream = made;
  return kSuccess;
}

aclError aclrtCreateStream(void** stream) {
  return new_stream(stream);
}

aclError aclrtCreateStreamWithConfig(void** stream, uint32_t priority, uint32_t flag) {
  (void)priority;
  (void)flag;
  return new_stream(stream);
}

aclError aclrtDestroyStream(void* stream) {
  free(stream);
  return kSuccess;
}

aclError aclrtDestroyStreamForce(void* stream) {
  return aclrtDestroyStream(stream);
}

aclError aclrtSynchronizeStream(void* stream) {
  (void)stream;
  return kSuccess;
}

aclError aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout_ms) {
  (void)stream;
  (void)timeout_ms;
  return kSuccess;
}

aclError aclrtStreamQuery(void* stream, int* status) {
  (void)stream;
  *status = 0;  // ACL_STREAM_STATUS_COMPLETE
  return kSuccess;
}

aclError aclrtStreamGetId(void* stream, int32_t* id) {
  *id = stream ? ((Stream*)stream)->id : 0;
  return kSuccess;
}

aclError aclrtStreamWaitEvent(void* stream, void* event) {
  (void)stream;
  (void)event;
  return kSuccess;
}

aclError aclrtSetStreamFailureMode(void* stream, uint64_t mode) {
  (void)stream;
  (void)mode;
  return kSuccess;
}

aclError aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  (void)stream;
  function(argument);
  return kSuccess;
}

// ------------------------------------------------------------------------------------------------ events

typedef struct {
  uint64_t nanoseconds;
  int is_foreign;
} Event;

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static aclError new_event(void** event) {
  *event = calloc(1, sizeof(Event));
  return kSuccess;
}

aclError aclrtCreateEventWithFlag(void** event, uint32_t flag) {
  (void)flag;
  return new_event(event);
}

aclError aclrtCreateEventExWithFlag(void** event, uint32_t flag) {
  (void)flag;
  return new_event(event);
}

aclError aclrtDestroyEvent(void* event) {
  free(event);
  return kSuccess;
}

aclError aclrtRecordEvent(void* event, void* stream) {
  (void)stream;
  ((Event*)event)->nanoseconds = now();
  return kSuccess;
}

aclError aclrtResetEvent(void* event, void* stream) {
  (void)event;
  (void)stream;
  return kSuccess;
}

aclError aclrtSynchronizeEvent(void* event) {
  (void)event;
  return kSuccess;
}

aclError aclrtQueryEventStatus(void* event, int* status) {
  (void)event;
  *status = 1;  // ACL_EVENT_RECORDED_STATUS_COMPLETE
  return kSuccess;
}

aclError aclrtQueryEventWaitStatus(void* event, int* status) {
  (void)event;
  *status = 0;  // ACL_EVENT_WAIT_STATUS_COMPLETE
  return kSuccess;
}

aclError aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  *milliseconds = (float)((double)(((Event*)end)->nanoseconds - ((Event*)start)->nanoseconds) / 1e6);
  return kSuccess;
}

aclError aclrtEventGetTimestamp(void* event, uint64_t* microseconds) {
  *microseconds = ((Event*)event)->nanoseconds / 1000;
  return kSuccess;
}

typedef struct {
  char reserved[64];
} IpcEvent;

aclError aclrtIpcGetEventHandle(void* event, IpcEvent* handle) {
  (void)event;
  memset(handle, 0, sizeof *handle);
  strcpy(handle->reserved, "cann_sim event");
  return kSuccess;
}

aclError aclrtIpcOpenEventHandle(IpcEvent handle, void** event) {
  if (strcmp(handle.reserved, "cann_sim event") != 0) {
    return kInvalidParam;
  }
  return new_event(event);
}

// ------------------------------------------------------------------------------------------------ settings, texts

const char* aclGetRecentErrMsg(void) {
  return "simulated CANN: no text";
}

aclError aclrtPeekAtLastError(int level) {
  (void)level;
  return kSuccess;
}

aclError aclrtGetLastError(int level) {
  (void)level;
  return kSuccess;
}

aclError aclSetCompileopt(int option, const char* value) {
  (void)option;
  (void)value;
  return kSuccess;
}

size_t aclGetCompileoptSize(int option) {
  (void)option;
  return 64;
}

aclError aclGetCompileopt(int option, char* value, size_t length) {
  (void)option;
  snprintf(value, length, "disable");  // such as compiling operators at their first call
  return kSuccess;
}

aclError aclrtSetSysParamOpt(int option, int64_t value) {
  (void)option;
  (void)value;
  return kSuccess;
}

aclError aclrtGetSysParamOpt(int option, int64_t* value) {
  (void)option;
  *value = 0;
  return kSuccess;
}

aclError aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

aclError aclrtSetDeviceSatMode(int mode) {
  (void)mode;
  return kSuccess;
}

aclError aclrtSetOpWaitTimeout(uint32_t seconds) {
  (void)seconds;
  return kSuccess;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
  (void)seconds;
  return kSuccess;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t* actual) {
  *actual = microseconds;
  return kSuccess;
}

aclError aclsysGetVersionStr(const char* package, char* version) {
  (void)package;
  strcpy(version, "8.5.0");
  return kSuccess;
}

aclError aclGetCannAttributeList(const int** attributes, size_t* count) {
  static const int none[1];
  *attributes = none;
  *count = 0;
  return kSuccess;
}

aclError aclmdlInitDump(void) {
  return kSuccess;
}

aclError aclmdlFinalizeDump(void) {
  return kSuccess;
}

void aclAppLog(int level, const char* function, const char* file, uint32_t line, const char* format, ...) {
  (void)level;
  (void)function;
  (void)file;
  (void)line;
  (void)format;
}

// The profiler of CANN: told of every operator, whether it runs or not.

int32_t MsprofRegisterCallback(uint32_t module, void* callback) {
  (void)module;
  (void)callback;
  return 0;
}

int32_t MsprofReportApi(uint32_t ageing, const void* api) {
  (void)ageing;
  (void)api;
  return 0;
}

int32_t MsprofReportCompactInfo(uint32_t ageing, const void* data, uint32_t length) {
  (void)ageing;
  (void)data;
  (void)length;
  return 0;
}

int32_t MsprofReportAdditionalInfo(uint32_t ageing, const void* data, uint32_t length) {
  return MsprofReportCompactInfo(ageing, data, length);
}

uint64_t MsprofSysCycleTime(void) {
  return now();
}

uint64_t MsprofGetHashId(const char* text, size_t length) {
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < length; ++i) {
    hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
  }
  return hash;
}

// The tracing interface of MindStudio: it can be subscribed to, and there is nothing to tell.

int msptiSubscribe(void** subscriber, void* callback, void* argument) {
  (void)callback;
  (void)argument;
  *subscriber = &contexts;
  return 0;
}

int msptiUnsubscribe(void* subscriber) {
  (void)subscriber;
  return 0;
}

int msptiActivityRegisterCallbacks(void* request, void* complete) {
  (void)request;
  (void)complete;
  return 0;
}

int msptiActivityEnable(int kind) {
  (void)kind;
  return 0;
}

int msptiActivityDisable(int kind) {
  (void)kind;
  return 0;
}

int msptiActivityFlushAll(uint32_t flag) {
  (void)flag;
  return 0;
}

int msptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
  (void)kind;
  (void)id;
  return 0;
}

int msptiActivityPopExternalCorrelationId(int kind, uint64_t* last) {
  (void)kind;
  if (last) {
    *last = 0;
  }
  return 0;
}

// Operators that torch_npu compiles by their name: "Fill" and "PadV3" with zeros, which its gathers use.

typedef struct {
  int type, num_dims;
  int64_t dims[8];
} Description;

typedef struct {
  void* data;
  size_t bytes;
} Buffer;

void* aclCreateTensorDesc(int type, int num_dims, const int64_t* dims, int format) {
  (void)format;
  Description* made = calloc(1, sizeof *made);
  made->type = type;
  made->num_dims = num_dims < 8 ? num_dims : 8;
  memcpy(made->dims, dims, (size_t)made->num_dims * sizeof *dims);
  return made;
}

void aclDestroyTensorDesc(void* description) {
  free(description);
}

void* aclCreateDataBuffer(void* data, size_t bytes) {
  Buffer* made = malloc(sizeof *made);
  *made = (Buffer){data, bytes};
  return made;
}

aclError aclDestroyDataBuffer(void* buffer) {
  free(buffer);
  return kSuccess;
}

void* aclopCreateAttr(void) {
  return calloc(1, 1);
}

void aclopDestroyAttr(void* attributes) {
  free(attributes);
}

aclError aclSetTensorFormat(void* description, int format) {
  (void)description;
  (void)format;
  return kSuccess;
}

aclError aclSetTensorShape(void* description, int num_dims, const int64_t* dims) {
  (void)description;
  (void)num_dims;
  (void)dims;
  return kSuccess;
}

aclError aclSetTensorPlaceMent(void* description, int kind) {
  (void)description;
  (void)kind;
  return kSuccess;
}

void aclSetTensorDescName(void* description, const char* name) {
  (void)description;
  (void)name;
}

aclError aclopSetAttrBool(void* attributes, const char* name, uint8_t value) {
  (void)attributes;
  (void)name;
  (void)value;
  return kSuccess;
}

aclError aclopSetAttrInt(void* attributes, const char* name, int64_t value) {
  (void)attributes;
  (void)name;
  (void)value;
  return kSuccess;
}

aclError aclopSetAttrString(void* attributes, const char* name, const char* value) {
  (void)attributes;
  (void)name;
  (void)value;
  return kSuccess;
}

static size_t item_bytes(int type) {
  static const size_t sizes[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1};  // ACL_FLOAT to ACL_BOOL
  return type == 27 ? 2 : type >= 0 && type < 13 ? sizes[type] : 0;       // 27 is ACL_BF16
}

static void place(char* into, const int64_t* room, const char* from, const int64_t* dims, const int64_t* before,
                  int num_dims, size_t item) {
  if (num_dims == 1) {
    memcpy(into + (size_t)before[0] * item, from, (size_t)dims[0] * item);
    return;
  }
  size_t step = item, row = item;
  for (int i = 1; i < num_dims; ++i) {
    step *= (size_t)room[i];
    row *= (size_t)dims[i];
  }
  for (int64_t i = 0; i < dims[0]; ++i) {
    place(into + (size_t)(before[0] + i) * step, room + 1, from + (size_t)i * row, dims + 1, before + 1, num_dims - 1,
          item);
  }
}

aclError aclopCompileAndExecute(const char* type, int num_inputs, const Description* const inputs[],
                                const Buffer* const given[], int num_outputs, const Description* const outputs[],
                                Buffer* const made[]) {
  size_t item = num_outputs == 1 ? item_bytes(outputs[0]->type) : 0;
  if (strcmp(type, "Fill") == 0 && num_inputs == 2 && item && inputs[1]->type == outputs[0]->type) {
    sim_log("operator", type);
    for (size_t at = 0; at + item <= made[0]->bytes; at += item) {
      memcpy((char*)made[0]->data + at, given[1]->data, item);
    }
    return kSuccess;
  }
  if (strcmp(type, "PadV3") == 0 && num_inputs >= 2 && item && inputs[0]->num_dims == outputs[0]->num_dims) {
    sim_log("operator", type);
    int64_t before[8];
    for (int i = 0; i < inputs[0]->num_dims; ++i) {
      before[i] = inputs[1]->type == 9 ? ((int64_t*)given[1]->data)[2 * i] : ((int32_t*)given[1]->data)[2 * i];
    }
    memset(made[0]->data, 0, made[0]->bytes);
    place(made[0]->data, outputs[0]->dims, given[0]->data, inputs[0]->dims, before, inputs[0]->num_dims, item);
    return kSuccess;
  }
  sim_log("refused", type);
  return kNotSupported;
}

aclError aclopCompileAndExecuteV2(const char* type, int num_inputs, Description* inputs[], Buffer* given[],
                                  int num_outputs, Description* outputs[], Buffer* made[]) {
  return aclopCompileAndExecute(type, num_inputs, (const Description* const*)inputs, (const Buffer* const*)given,
                                num_outputs, (const Description* const*)outputs, made);
}
