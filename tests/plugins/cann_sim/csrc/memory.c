// Device memory: each block is an anonymous shared file, so that another process can map it by its descriptor.

#define _GNU_SOURCE
#include <pthread.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

enum { kOnHost = 0, kOnDevice = 1, kUnregistered = 2 };  // ACL_MEM_LOCATION_TYPE_*

typedef struct Block {
  char* start;
  size_t bytes;
  int kind;
  int device;
  int descriptor;  // -1: host memory, or a block of another process
  char key[65];    // by which this process imported it
  struct Block* next;
} Block;

static Block* blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Block* add(void* start, size_t bytes, int kind, int descriptor) {
  Block* block = calloc(1, sizeof *block);
  *block = (Block){.start = start, .bytes = bytes, .kind = kind, .device = sim_current_device(), .descriptor = descriptor};
  pthread_mutex_lock(&lock);
  block->next = blocks;
  blocks = block;
  pthread_mutex_unlock(&lock);
  return block;
}

// The block that begins at an address, taken out of the list.
static Block* take(void* start) {
  pthread_mutex_lock(&lock);
  Block** at = &blocks;
  while (*at && (*at)->start != (char*)start) {
    at = &(*at)->next;
  }
  Block* found = *at;
  if (found) {
    *at = found->next;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static Block holding(const void* address) {
  Block found = {.kind = kUnregistered, .descriptor = -1};
  pthread_mutex_lock(&lock);
  for (Block* block = blocks; block; block = block->next) {
    if ((char*)address >= block->start && (char*)address < block->start + block->bytes) {
      found = *block;
    }
  }
  pthread_mutex_unlock(&lock);
  return found;
}

// ------------------------------------------------------------------------------------------------ of the device

aclError aclrtMalloc(void** address, size_t bytes, int policy) {
  (void)policy;
  int device = sim_current_device();
  if (device < 0) {
    return kNoContext;
  }
  if (!bytes) {
    return kInvalidParam;
  }
  if (sim_used_bytes(device) + (int64_t)bytes > sim_total_bytes()) {
    return kOutOfMemory;
  }
  int descriptor = memfd_create("cann_sim", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes) != 0) {
    perror("simulated CANN: aclrtMalloc");
    return kOutOfMemory;
  }
  void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) {
    close(descriptor);
    return kOutOfMemory;
  }
  add(start, bytes, kOnDevice, descriptor);
  sim_count_bytes(device, (int64_t)bytes);
  *address = start;
  return kSuccess;
}

aclError aclrtMallocAlign32(void** address, size_t bytes, int policy) {
  return aclrtMalloc(address, bytes, policy);
}

aclError aclrtFree(void* address) {
  Block* block = take(address);
  if (!block || block->descriptor < 0) {
    sim_log("refused", "aclrtFree of what aclrtMalloc did not return");
    return kInvalidParam;
  }
  munmap(block->start, block->bytes);
  close(block->descriptor);
  sim_count_bytes(block->device, -(int64_t)block->bytes);
  free(block);
  return kSuccess;
}

aclError aclrtGetMemInfo(int kind, size_t* free_bytes, size_t* total_bytes) {
  (void)kind;
  if (sim_current_device() < 0) {
    return kNoContext;
  }
  int64_t used = sim_used_bytes(sim_current_device());
  *total_bytes = (size_t)sim_total_bytes();
  *free_bytes = used < sim_total_bytes() ? (size_t)(sim_total_bytes() - used) : 0;
  return kSuccess;
}

// ------------------------------------------------------------------------------------------------ of the host

static aclError malloc_host(void** address, size_t bytes) {
  void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (start == MAP_FAILED) {
    return kOutOfMemory;
  }
  add(start, bytes, kOnHost, -1);
  *address = start;
  return kSuccess;
}

aclError aclrtMallocHost(void** address, size_t bytes) {
  return malloc_host(address, bytes);
}

aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, void* config) {
  (void)config;
  return malloc_host(address, bytes);
}

aclError aclrtFreeHost(void* address) {
  Block* block = take(address);
  if (!block) {
    return kInvalidParam;
  }
  munmap(block->start, block->bytes);
  free(block);
  return kSuccess;
}

aclError aclrtHostRegister(void* address, uint64_t bytes, int type, void** mapped) {
  (void)type;
  add(address, bytes, kOnHost, -1);
  if (mapped) {
    *mapped = address;
  }
  return kSuccess;
}

aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t flag) {
  (void)flag;
  return aclrtHostRegister(address, bytes, 0, NULL);
}

aclError aclrtHostUnregister(void* address) {
  Block* block = take(address);
  free(block);
  return block ? kSuccess : kInvalidParam;
}

typedef struct {
  uint32_t id;
  int type;
  uint32_t page_bytes;
  uint32_t reserved[4];
} Attributes;

aclError aclrtPointerGetAttributes(const void* address, Attributes* attributes) {
  Block block = holding(address);
  *attributes = (Attributes){.id = (uint32_t)block.device, .type = block.kind, .page_bytes = 4096};
  return kSuccess;
}

// ------------------------------------------------------------------------------------------------ copies

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  (void)kind;
  if (bytes > room) {
    return kInvalidParam;
  }
  memmove(to, from, bytes);
  return kSuccess;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind, void* stream) {
  (void)stream;
  return aclrtMemcpy(to, room, from, bytes, kind);
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) {
    return kInvalidParam;
  }
  memset(to, value, bytes);
  return kSuccess;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, void* stream) {
  (void)stream;
  return aclrtMemset(to, room, value, bytes);
}

// ------------------------------------------------------------------------------------------------ other processes

aclError aclrtIpcMemGetExportKey(void* address, size_t bytes, char* key, size_t length, uint64_t flags) {
  (void)bytes;
  (void)flags;
  Block block = holding(address);
  if (block.kind != kOnDevice || block.descriptor < 0 || block.start != (char*)address) {
    sim_log("refused", "aclrtIpcMemGetExportKey of what is no block of this process");
    return kInvalidParam;
  }
  struct stat file;
  fstat(block.descriptor, &file);
  memset(key, 0, length);
  snprintf(key, length, "%d:%d:%lu:%zu:%d", getpid(), block.descriptor, (unsigned long)file.st_ino, block.bytes,
           sim_physical(block.device));
  return kSuccess;
}

aclError aclrtIpcMemImportByKey(void** address, const char* key, uint64_t flags) {
  (void)flags;
  int pid, descriptor, physical;
  unsigned long inode;
  size_t bytes;
  if (sscanf(key, "%d:%d:%lu:%zu:%d", &pid, &descriptor, &inode, &bytes, &physical) != 5) {
    return kInvalidParam;
  }
  if (sim_physical(sim_current_device()) != physical) {
    sim_log("refused", "aclrtIpcMemImportByKey of memory of another device");
    return kInvalidDevice;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  int file = open(path, O_RDWR | O_CLOEXEC);
  struct stat found;
  if (file < 0 || fstat(file, &found) != 0 || found.st_ino != inode) {
    fprintf(stderr, "simulated CANN: the exporter of %s has ended or has freed it\n", key);
    return kInvalidParam;
  }
  void* start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) {
    return kOutOfMemory;
  }
  Block* block = add(start, bytes, kOnDevice, -1);
  snprintf(block->key, sizeof block->key, "%s", key);
  *address = start;
  return kSuccess;
}

aclError aclrtIpcMemClose(const char* key) {
  pthread_mutex_lock(&lock);
  Block* found = blocks;
  while (found && strcmp(found->key, key) != 0) {
    found = found->next;
  }
  void* start = found ? found->start : NULL;
  pthread_mutex_unlock(&lock);
  if (!start) {
    return kSuccess;  // the exporter's own word that it is done with the key
  }
  Block* block = take(start);
  munmap(block->start, block->bytes);
  free(block);
  return kSuccess;
}

aclError aclrtIpcMemSetImportPid(const char* key, int32_t* pids, size_t count) {
  (void)key;
  (void)pids;
  (void)count;
  return kSuccess;
}
