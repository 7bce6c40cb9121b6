// A stand-in for the libraries of CANN on a machine without an NPU: devices are host memory, everything is done when
// a call returns. Written from the symbols that the torch_npu wheel asks for (nm -D) and the public AscendCL and HCCL
// reference. It knows nothing of speed, of stream order, or of an operator's numbers on hardware.

#ifndef CANN_SIM_H
#define CANN_SIM_H

#include <stddef.h>
#include <stdint.h>

typedef int aclError;

enum {
  kSuccess = 0,
  kInvalidParam = 100000,    // ACL_ERROR_INVALID_PARAM
  kInvalidDevice = 107001,   // ACL_ERROR_RT_INVALID_DEVICEID
  kNoContext = 107002,       // ACL_ERROR_RT_CONTEXT_NULL
  kOutOfMemory = 207001,     // ACL_ERROR_RT_MEMORY_ALLOCATION
  kNotSupported = 200001,    // ACL_ERROR_API_NOT_SUPPORT
};

// One line of CANN_SIM_LOG, "kind what"; what is refused goes to stderr too.
void sim_log(const char* kind, const char* what);

int sim_num_visible(void);
int sim_physical(int device);  // -1 if it is not visible
int sim_current_device(void);  // -1 if this thread has none

void sim_count_bytes(int device, int64_t bytes);  // of this process, negative when they are freed
int64_t sim_used_bytes(int device);               // of all processes that live
int64_t sim_total_bytes(void);

#endif
