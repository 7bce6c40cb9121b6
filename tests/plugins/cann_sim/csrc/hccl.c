// Collectives of processes of one machine. What a rank contributes is a file in the communicator's folder, which the
// others wait for: every operation carries what it is, so that ranks that call different ones are told.
//
// A rank that has seen everybody's operation n + 1 knows that everybody has read operation n: then its file can go.

#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { kInvalid = 1, kTimeout = 9 };  // HCCL_E_PARA, HCCL_E_TIMEOUT
enum { kSum, kProduct, kMax, kMin };
enum { kInt8, kInt16, kInt32, kFloat16, kFloat32, kInt64, kUInt64, kUInt8, kUInt16, kUInt32, kFloat64, kBFloat16 };

static const int kItemBytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};

typedef struct {
  char folder[128];
  int rank, size;
  uint64_t operations;
  uint64_t *sent, *received;  // to and from each rank
} Comm;

typedef struct {
  char operation[32];
  uint64_t count;
  int dtype, reduce, root, unused;
} Header;

typedef struct {
  Header* header;
  char* data;
  size_t bytes;
} Message;

// ------------------------------------------------------------------------------------------------ messages

static void path_of(char* path, size_t room, const Comm* comm, const char* kind, uint64_t number, int from, int to) {
  snprintf(path, room, "%s/%s-%lu-%d-%d", comm->folder, kind, (unsigned long)number, from, to);
}

typedef struct {
  const void* data;
  size_t bytes;
} Piece;

static aclError post(const char* path, const Header* header, const Piece* pieces, int count) {
  char hidden[256];
  snprintf(hidden, sizeof hidden, "%s.new", path);
  FILE* file = fopen(hidden, "we");
  int is_whole = file && fwrite(header, sizeof *header, 1, file) == 1;
  for (int i = 0; is_whole && i < count; ++i) {
    is_whole = !pieces[i].bytes || fwrite(pieces[i].data, pieces[i].bytes, 1, file) == 1;
  }
  if (!file || fclose(file) != 0 || !is_whole || rename(hidden, path) != 0) {
    perror("simulated CANN: a collective could not write");
    return kInvalid;
  }
  return kSuccess;
}

static aclError await(const char* path, Message* message) {
  const char* limit = getenv("CANN_SIM_TIMEOUT_S");
  time_t deadline = time(NULL) + (limit ? atoi(limit) : 120);
  int file;
  for (useconds_t pause = 10; (file = open(path, O_RDONLY | O_CLOEXEC)) < 0; pause = pause < 1000 ? pause * 2 : pause) {
    if (time(NULL) > deadline) {
      fprintf(stderr, "simulated CANN: nobody sent %s\n", path);
      return kTimeout;
    }
    usleep(pause);
  }
  struct stat found;
  fstat(file, &found);
  message->bytes = (size_t)found.st_size;
  message->header = mmap(NULL, message->bytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (message->header == MAP_FAILED) {
    return kInvalid;
  }
  message->data = (char*)(message->header + 1);
  return kSuccess;
}

static void release(Message* message) {
  munmap(message->header, message->bytes);
}

// What all ranks contributed to the next operation; each of them must have called the same.
static aclError exchange(Comm* comm, Header header, const Piece* pieces, int count, Message* messages) {
  sim_log("operator", header.operation);
  char path[200];
  uint64_t number = comm->operations++;
  path_of(path, sizeof path, comm, "all", number, comm->rank, 0);
  aclError error = post(path, &header, pieces, count);
  for (int rank = 0; rank < comm->size && !error; ++rank) {
    path_of(path, sizeof path, comm, "all", number, rank, 0);
    error = await(path, &messages[rank]);
    if (!error && memcmp(messages[rank].header, &header, sizeof header) != 0) {
      fprintf(stderr, "simulated CANN: rank %d called %s of %lu, rank %d %s of %lu\n", comm->rank, header.operation,
              (unsigned long)header.count, rank, messages[rank].header->operation,
              (unsigned long)messages[rank].header->count);
      error = kInvalid;
    }
  }
  if (!error && number) {
    path_of(path, sizeof path, comm, "all", number - 1, comm->rank, 0);
    unlink(path);
  }
  return error;
}

static void release_all(Comm* comm, Message* messages) {
  for (int rank = 0; rank < comm->size; ++rank) {
    release(&messages[rank]);
  }
  free(messages);
}

// ------------------------------------------------------------------------------------------------ reductions

static float widen(uint16_t bits, int dtype) {
  union {
    uint32_t bits;
    float value;
  } wide;
  if (dtype == kBFloat16) {
    wide.bits = (uint32_t)bits << 16;
    return wide.value;
  }
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return mantissa ? NAN : sign * INFINITY;
  }
  return sign * (exponent ? ldexpf((float)(mantissa + 1024), exponent - 25) : ldexpf((float)mantissa, -24));
}

static uint16_t narrow(float value, int dtype) {
  union {
    float value;
    uint32_t bits;
  } wide = {value};
  if (dtype == kBFloat16) {
    return isnan(value) ? 0x7fc0 : (uint16_t)((wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16);
  }
  uint16_t sign = wide.bits >> 16 & 0x8000;
  float size = fabsf(value);
  if (isnan(value)) {
    return 0x7e00;
  }
  if (size >= 65520.0f) {
    return sign | 0x7c00;
  }
  if (size < 6.103515625e-05f) {
    return sign | (uint16_t)nearbyintf(ldexpf(size, 24));
  }
  int exponent;
  float fraction = frexpf(size, &exponent);
  return sign | (uint16_t)((exponent + 13) * 1024 + (int)nearbyintf(ldexpf(fraction, 11)));
}

#define COMBINE(a, b) (op == kSum ? (a) + (b) : op == kProduct ? (a) * (b) : op == kMax ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define REDUCE(Type)                                     \
  for (uint64_t i = 0; i < count; ++i) {                 \
    Type a = ((Type*)into)[i], b = ((const Type*)with)[i]; \
    ((Type*)into)[i] = (Type)COMBINE(a, b);              \
  }

static void reduce(void* into, const void* with, uint64_t count, int dtype, int op) {
  switch (dtype) {
    case kInt8: REDUCE(int8_t) break;
    case kInt16: REDUCE(int16_t) break;
    case kInt32: REDUCE(int32_t) break;
    case kInt64: REDUCE(int64_t) break;
    case kFloat32: REDUCE(float) break;
    default:
      for (uint64_t i = 0; i < count; ++i) {
        float a = widen(((uint16_t*)into)[i], dtype), b = widen(((const uint16_t*)with)[i], dtype);
        ((uint16_t*)into)[i] = narrow(COMBINE(a, b), dtype);
      }
  }
}

// What HCCL's reference lists for reductions: no unsigned numbers, no 64-bit floats, and no product of two of the rest.
static aclError check_reduction(int dtype, int op) {
  int is_known = dtype == kInt8 || dtype == kInt16 || dtype == kInt32 || dtype == kInt64 || dtype == kFloat16 ||
                 dtype == kFloat32 || dtype == kBFloat16;
  if (is_known && op >= kSum && op <= kMin && !(op == kProduct && (dtype == kInt16 || dtype == kBFloat16))) {
    return kSuccess;
  }
  char what[64];
  snprintf(what, sizeof what, "HCCL reduction %d of dtype %d", op, dtype);
  sim_log("refused", what);
  return kInvalid;
}

// The reduction of `count` items from item `first` of what every rank sent.
static aclError reduce_all(Comm* comm, Header header, const void* send, uint64_t total, void* into, uint64_t first,
                           uint64_t count) {
  aclError error = check_reduction(header.dtype, header.reduce);
  if (error) {
    return error;
  }
  size_t item = (size_t)kItemBytes[header.dtype];
  Message* messages = calloc((size_t)comm->size, sizeof *messages);
  error = exchange(comm, header, &(Piece){send, total * item}, 1, messages);
  if (error) {
    return error;
  }
  if (into) {
    memcpy(into, messages[0].data + first * item, count * item);
    for (int rank = 1; rank < comm->size; ++rank) {
      reduce(into, messages[rank].data + first * item, count, header.dtype, header.reduce);
    }
  }
  release_all(comm, messages);
  return kSuccess;
}

static Header header_of(const char* operation, uint64_t count, int dtype, int op, int root) {
  Header header = {.count = count, .dtype = dtype, .reduce = op, .root = root};
  strncpy(header.operation, operation, sizeof header.operation - 1);
  return header;
}

aclError HcclAllReduce(void* send, void* receive, uint64_t count, int dtype, int op, Comm* comm, void* stream) {
  (void)stream;
  return reduce_all(comm, header_of("HcclAllReduce", count, dtype, op, 0), send, count, receive, 0, count);
}

aclError HcclReduce(void* send, void* receive, uint64_t count, int dtype, int op, uint32_t root, Comm* comm,
                    void* stream) {
  (void)stream;
  Header header = header_of("HcclReduce", count, dtype, op, (int)root);
  return reduce_all(comm, header, send, count, (int)root == comm->rank ? receive : NULL, 0, count);
}

aclError HcclReduceScatter(void* send, void* receive, uint64_t count, int dtype, int op, Comm* comm, void* stream) {
  (void)stream;
  Header header = header_of("HcclReduceScatter", count, dtype, op, 0);
  return reduce_all(comm, header, send, count * (uint64_t)comm->size, receive, count * (uint64_t)comm->rank, count);
}

// ------------------------------------------------------------------------------------------------ movements

aclError HcclBroadcast(void* buffer, uint64_t count, int dtype, uint32_t root, Comm* comm, void* stream) {
  (void)stream;
  size_t bytes = count * (size_t)kItemBytes[dtype];
  Message* messages = calloc((size_t)comm->size, sizeof *messages);
  Piece mine = {buffer, (int)root == comm->rank ? bytes : 0};
  aclError error = exchange(comm, header_of("HcclBroadcast", count, dtype, 0, (int)root), &mine, 1, messages);
  if (!error) {
    memcpy(buffer, messages[root].data, bytes);
    release_all(comm, messages);
  }
  return error;
}

aclError HcclAllGather(void* send, void* receive, uint64_t count, int dtype, Comm* comm, void* stream) {
  (void)stream;
  size_t bytes = count * (size_t)kItemBytes[dtype];
  Message* messages = calloc((size_t)comm->size, sizeof *messages);
  aclError error = exchange(comm, header_of("HcclAllGather", count, dtype, 0, 0), &(Piece){send, bytes}, 1, messages);
  for (int rank = 0; rank < comm->size && !error; ++rank) {
    memcpy((char*)receive + bytes * (size_t)rank, messages[rank].data, bytes);
  }
  if (!error) {
    release_all(comm, messages);
  }
  return error;
}

aclError HcclScatter(void* send, void* receive, uint64_t count, int dtype, uint32_t root, Comm* comm, void* stream) {
  (void)stream;
  size_t bytes = count * (size_t)kItemBytes[dtype];
  Message* messages = calloc((size_t)comm->size, sizeof *messages);
  Piece mine = {send, (int)root == comm->rank ? bytes * (size_t)comm->size : 0};
  aclError error = exchange(comm, header_of("HcclScatter", count, dtype, 0, (int)root), &mine, 1, messages);
  if (!error) {
    memcpy(receive, messages[root].data + bytes * (size_t)comm->rank, bytes);
    release_all(comm, messages);
  }
  return error;
}

aclError HcclBarrier(Comm* comm, void* stream) {
  (void)stream;
  Message* messages = calloc((size_t)comm->size, sizeof *messages);
  aclError error = exchange(comm, header_of("HcclBarrier", 0, 0, 0, 0), NULL, 0, messages);
  if (!error) {
    release_all(comm, messages);
  }
  return error;
}

// A message of a rank begins with what it has for each: counts, then the items in the order of ranks.
aclError HcclAlltoAllV(const void* send, const uint64_t* counts, const uint64_t* offsets, int dtype, void* receive,
                       const uint64_t* expected, const uint64_t* places, int received_dtype, Comm* comm,
                       void* stream) {
  (void)stream;
  (void)received_dtype;
  size_t item = (size_t)kItemBytes[dtype], size = (size_t)comm->size;
  Piece* pieces = calloc(size + 1, sizeof *pieces);
  pieces[0] = (Piece){counts, size * sizeof *counts};
  for (size_t to = 0; to < size; ++to) {
    pieces[to + 1] = (Piece){(const char*)send + offsets[to] * item, counts[to] * item};
  }
  Message* messages = calloc(size, sizeof *messages);
  aclError error = exchange(comm, header_of("HcclAlltoAllV", 0, dtype, 0, 0), pieces, (int)size + 1, messages);
  free(pieces);
  for (size_t from = 0; from < size && !error; ++from) {
    const uint64_t* sent = (const uint64_t*)messages[from].data;
    const char* data = messages[from].data + size * sizeof *sent;
    for (int to = 0; to < comm->rank; ++to) {
      data += sent[to] * item;
    }
    if (sent[comm->rank] != expected[from]) {
      fprintf(stderr, "simulated CANN: rank %zu sends %lu items, rank %d expects %lu\n", from,
              (unsigned long)sent[comm->rank], comm->rank, (unsigned long)expected[from]);
      error = kInvalid;
    } else {
      memcpy((char*)receive + places[from] * item, data, expected[from] * item);
    }
  }
  if (!error) {
    release_all(comm, messages);
  }
  return error;
}

aclError HcclAlltoAll(const void* send, uint64_t count, int dtype, void* receive, uint64_t expected,
                      int received_dtype, Comm* comm, void* stream) {
  uint64_t counts[64], wanted[64], offsets[64];
  for (int rank = 0; rank < comm->size; ++rank) {
    counts[rank] = count;
    wanted[rank] = expected;
    offsets[rank] = count * (uint64_t)rank;
  }
  return HcclAlltoAllV(send, counts, offsets, dtype, receive, wanted, offsets, received_dtype, comm, stream);
}

aclError HcclSend(void* buffer, uint64_t count, int dtype, uint32_t to, Comm* comm, void* stream) {
  (void)stream;
  sim_log("operator", "HcclSend");
  char path[200];
  path_of(path, sizeof path, comm, "one", comm->sent[to]++, comm->rank, (int)to);
  Header header = header_of("HcclSend", count, dtype, 0, 0);
  return post(path, &header, &(Piece){buffer, count * (size_t)kItemBytes[dtype]}, 1);
}

aclError HcclRecv(void* buffer, uint64_t count, int dtype, uint32_t from, Comm* comm, void* stream) {
  (void)stream;
  sim_log("operator", "HcclRecv");
  char path[200];
  path_of(path, sizeof path, comm, "one", comm->received[from]++, (int)from, comm->rank);
  Message message;
  aclError error = await(path, &message);
  if (error) {
    return error;
  }
  unlink(path);
  if (message.header->count != count || message.header->dtype != dtype) {
    fprintf(stderr, "simulated CANN: rank %d expects other items than rank %u sent\n", comm->rank, from);
    error = kInvalid;
  } else {
    memcpy(buffer, message.data, count * (size_t)kItemBytes[dtype]);
  }
  release(&message);
  return error;
}

typedef struct {
  int is_receive;
  void* buffer;
  uint64_t count;
  int dtype;
  uint32_t rank;
} Task;

aclError HcclBatchSendRecv(Task* tasks, uint32_t count, Comm* comm, void* stream) {
  aclError error = kSuccess;
  for (int is_receive = 0; is_receive < 2; ++is_receive) {  // a send does not wait
    for (uint32_t i = 0; i < count && !error; ++i) {
      Task* task = &tasks[i];
      if (task->is_receive == is_receive) {
        error = (is_receive ? HcclRecv : HcclSend)(task->buffer, task->count, task->dtype, task->rank, comm, stream);
      }
    }
  }
  return error;
}

// ------------------------------------------------------------------------------------------------ communicators

// The root's: the name of the folder where the ranks meet.
aclError HcclGetRootInfo(char* root_info) {
  memset(root_info, 0, 4108);
  snprintf(root_info, 128, "/dev/shm/cann_sim-%u-XXXXXX", getuid());
  return mkdtemp(root_info) ? kSuccess : kInvalid;
}

aclError HcclCommInitRootInfo(uint32_t size, const char* root_info, uint32_t rank, Comm** comm) {
  Comm* made = calloc(1, sizeof *made);
  snprintf(made->folder, sizeof made->folder, "%.127s", root_info);
  made->rank = (int)rank;
  made->size = (int)size;
  made->sent = calloc(size, sizeof *made->sent);
  made->received = calloc(size, sizeof *made->received);
  *comm = made;
  return HcclBarrier(made, NULL);
}

aclError HcclCommInitRootInfoConfig(uint32_t size, const char* root_info, uint32_t rank, const void* config,
                                    Comm** comm) {
  (void)config;
  return HcclCommInitRootInfo(size, root_info, rank, comm);
}

// Nobody waits here: files that a slower rank still reads stay until the last one leaves.
aclError HcclCommDestroy(Comm* comm) {
  char path[200];
  snprintf(path, sizeof path, "%s/left-%d", comm->folder, comm->rank);
  close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  int left = 0;
  for (int rank = 0; rank < comm->size; ++rank) {
    snprintf(path, sizeof path, "%s/left-%d", comm->folder, rank);
    left += access(path, F_OK) == 0;
  }
  for (int rank = 0; rank < comm->size && left == comm->size; ++rank) {
    snprintf(path, sizeof path, "%s/left-%d", comm->folder, rank);
    unlink(path);
    path_of(path, sizeof path, comm, "all", comm->operations - 1, rank, 0);
    unlink(path);
  }
  rmdir(comm->folder);  // fails as long as it is not empty
  free(comm->sent);
  free(comm->received);
  free(comm);
  return kSuccess;
}

aclError HcclGetCommName(Comm* comm, char* name) {
  snprintf(name, 128, "%s", comm->folder + strlen("/dev/shm/"));
  return kSuccess;
}

aclError HcclGetCommAsyncError(Comm* comm, int* error) {
  (void)comm;
  *error = kSuccess;
  return kSuccess;
}

uint32_t HcclGetCommConfigCapability(void) {
  return 0;
}

aclError HcclSetConfig(int option, int64_t value) {
  (void)option;
  (void)value;
  return kSuccess;
}

const char* HcclGetErrorString(int code) {
  return code == kTimeout ? "simulated CANN: a rank did not come" : "simulated CANN: see stderr";
}
