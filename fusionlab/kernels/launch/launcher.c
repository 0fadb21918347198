// The launch seam without Python: XLA's custom call looks its plan up by name and launches the steps that Python prepared for it.
//
// Compiled on first use by `native.py` against the headers of the jaxlib installed (`jax.ffi.include_dir()`), with no CUDA headers: the
// functions of the driver and of cuBLASLt that it calls are handed to it as addresses. What it cannot do (a plan nobody prepared, one
// whose steps are Python) it gives to the Python handler.
//
// Sources: XLA's FFI (xla/ffi/api/c_api.h, record_c_api.h, OpenXLA); CUDA driver API, "Execution Control" (cuLaunchKernel,
// cuLaunchKernelEx, CUlaunchAttribute); cuBLAS library, cublasLtMatmul and cublasLtMatmulDescSetAttribute.

#define _GNU_SOURCE  // dladdr
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"
#if XLA_FFI_API_MINOR >= 4
#include "xla/ffi/api/record_c_api.h"
#endif

#define EXPORT __attribute__((visibility("default")))
#define MAX_PARAMS 512  // 4 KB, as a kernel takes at most of older drivers
#define MAX_NAME_SHOWN 4000

// What the host process gave: addresses of functions; 0 where there is none.
typedef struct {
  int (*current_device)(int*);                   // cuCtxGetDevice
  int (*launch)(const void*, void*, void**, void**);  // cuLaunchKernelEx
  int (*error_text)(int, const char**);          // cuGetErrorString
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                const void*, void*, size_t, void*);  // cublasLtMatmul
  int (*set_attribute)(void*, int, const void*, size_t);  // cublasLtMatmulDescSetAttribute
} Driver;

// CUlaunchConfig and one CUlaunchAttribute of the driver API.
typedef struct {
  int id;
  int pad;
  union {
    int number;
    char bytes[64];
  } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
} Config;
enum { COOPERATIVE = 2, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };  // CUlaunchAttributeID

// Where a step finds an address: in the operands, in the results, or nowhere (a value given with the plan).
enum { OPERAND = 0, RESULT = 1, VALUE64 = 2, VALUE32 = 3, NOTHING = 4 };

typedef struct {
  void* function;  // CUfunction
  unsigned grid[3], block[3], shared;
  int early;  // waits itself for what came before it (griddepcontrol.wait), so it may start early
  int cooperative;  // its blocks wait for each other
  int count;
  unsigned char kinds[MAX_PARAMS];
  uint64_t values[MAX_PARAMS];  // a number of an operand or result, or the value itself
  const char* entry;
  const void* image;  // the cubin, kept by the host for good
  int64_t image_size;
} Kernel;

typedef struct {
  void *handle, *desc, *a_layout, *b_layout, *d_layout;
  const void *alpha, *beta, *algorithm;
  size_t workspace_size;
  int places[14];  // (kind, number) of A, B, bias, auxiliary matrix, C, D, workspace
  int bias_attribute, aux_attribute;
  pthread_mutex_t lock;  // bias and auxiliary addresses are attributes of the descriptor
} Matmul;

typedef struct {
  enum { KERNEL, MATMUL } kind;
  union {
    Kernel kernel;
    Matmul matmul;
  };
} Step;

typedef struct Program {
  struct Program* next;
  char* name;
  size_t length;
  int device;
  int count;
  int64_t operands, results;  // how many a call must have at least
  Step* steps;
} Program;

enum { BUCKETS = 1 << 12 };

static Driver driver;
static XLA_FFI_Handler* python[2];  // by platform: 0 the host, 1 CUDA
static _Atomic(Program*) table[BUCKETS];
static pthread_mutex_t inserting = PTHREAD_MUTEX_INITIALIZER;
static atomic_llong launched, recorded, handed_over;
static const char* recording_target;  // the name of the second target, where there is one
static atomic_int recording_registered;

// ---- Programs, built by Python, read by handlers without a lock.

static unsigned bucket_of(const char* name, size_t length, int device) {
  uint64_t hash = 1469598103934665603u + (uint64_t)device;  // FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
  for (size_t i = 0; i < length; ++i) hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
  return (unsigned)(hash ^ (hash >> 32)) % BUCKETS;
}

static Program* find(const char* name, size_t length, int device) {
  Program* one = atomic_load_explicit(&table[bucket_of(name, length, device)], memory_order_acquire);
  while (one && !(one->device == device && one->length == length && !memcmp(one->name, name, length))) one = one->next;
  return one;
}

EXPORT void fl_driver(void* device, void* launch, void* text) {
  driver.launch = launch, driver.error_text = text, driver.current_device = device;
}

EXPORT void fl_cublaslt(void* matmul, void* set_attribute) { driver.matmul = matmul, driver.set_attribute = set_attribute; }

EXPORT void fl_python(void* host, void* cuda) {
  python[0] = (XLA_FFI_Handler*)host;
  python[1] = (XLA_FFI_Handler*)cuda;
}

EXPORT Program* fl_program(const char* name, size_t length, int device, int steps) {
  Program* made = calloc(1, sizeof *made);
  made->name = malloc(length);
  memcpy(made->name, name, length);
  made->length = length, made->device = device;
  made->steps = calloc(steps ? steps : 1, sizeof(Step));
  return made;
}

static void need(Program* program, int kind, int64_t number) {
  int64_t* least = kind == OPERAND ? &program->operands : kind == RESULT ? &program->results : NULL;
  if (least && *least <= number) *least = number + 1;
}

// Returns 0 where the kernel has more parameters than a step holds.
EXPORT int fl_kernel(Program* program, void* function, const unsigned* geometry, int early, int cooperative, int count,
                     const unsigned char* kinds,
                     const uint64_t* values, const char* entry, const void* image, int64_t image_size) {
  if (count > MAX_PARAMS) return 0;
  Step* step = &program->steps[program->count++];
  step->kind = KERNEL;
  Kernel* k = &step->kernel;
  k->function = function, k->early = early, k->cooperative = cooperative, k->count = count, k->entry = entry, k->image = image, k->image_size = image_size;
  memcpy(k->grid, geometry, sizeof k->grid);
  memcpy(k->block, geometry + 3, sizeof k->block);
  k->shared = geometry[6];
  memcpy(k->kinds, kinds, count);
  memcpy(k->values, values, count * sizeof *values);
  for (int i = 0; i < count; ++i) need(program, kinds[i], (int64_t)values[i]);
  return 1;
}

EXPORT void fl_matmul(Program* program, void* const* pointers, size_t workspace_size, const int* places, int bias_attribute,
                      int aux_attribute) {
  Step* step = &program->steps[program->count++];
  step->kind = MATMUL;
  Matmul* m = &step->matmul;
  m->handle = pointers[0], m->desc = pointers[1], m->a_layout = pointers[2], m->b_layout = pointers[3], m->d_layout = pointers[4];
  m->alpha = pointers[5], m->beta = pointers[6], m->algorithm = pointers[7];
  m->workspace_size = workspace_size;
  memcpy(m->places, places, sizeof m->places);
  for (int i = 0; i < 14; i += 2) need(program, places[i], places[i + 1]);
  m->bias_attribute = bias_attribute, m->aux_attribute = aux_attribute;
  pthread_mutex_init(&m->lock, NULL);
}

// From here on handlers see the program. It is never changed nor freed, as an executable may use it at any time.
EXPORT void fl_publish(Program* program) {
  unsigned bucket = bucket_of(program->name, program->length, program->device);
  pthread_mutex_lock(&inserting);
  program->next = atomic_load(&table[bucket]);
  atomic_store_explicit(&table[bucket], program, memory_order_release);
  pthread_mutex_unlock(&inserting);
}

EXPORT int fl_known(const char* name, size_t length, int device) { return find(name, length, device) != NULL; }

EXPORT void fl_counters(long long* found) {
  found[0] = atomic_load(&launched), found[1] = atomic_load(&recorded), found[2] = atomic_load(&handed_over);
}

// ---- The call frame.

typedef struct {
  const char* name;
  size_t length;
} Name;

static int is_question(const XLA_FFI_CallFrame* frame) {
  return frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata;
}

static XLA_FFI_Error* describe(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  return NULL;
}

// The one attribute; a null name where the call has others, of which Python says what is wrong.
static Name name_of(const XLA_FFI_CallFrame* frame) {
  Name found = {NULL, 0};
  if (frame->attrs.size == 1 && frame->attrs.types[0] == XLA_FFI_AttrType_STRING) {
    const XLA_FFI_ByteSpan* span = frame->attrs.attrs[0];
    found.name = span->ptr, found.length = span->len;
  }
  return found;
}

static Program* program_of(const XLA_FFI_CallFrame* frame, int on_cuda) {
  Name name = name_of(frame);
  int device = 0;
  // Without a driver nothing was published yet: an executable from a cache is not instantiated again.
  if (!name.name || (on_cuda && (!driver.current_device || driver.current_device(&device)))) return NULL;
  return find(name.name, name.length, device);
}

static int has_all(const XLA_FFI_CallFrame* frame, const Program* program) {
  return frame->args.size >= program->operands && frame->rets.size >= program->results;
}

static uint64_t address_in(const XLA_FFI_CallFrame* frame, int kind, int64_t number) {
  const XLA_FFI_Buffer* buffer = kind == OPERAND ? frame->args.args[number] : frame->rets.rets[number];
  return (uint64_t)buffer->data;
}

static XLA_FFI_Error* failure(XLA_FFI_CallFrame* frame, const char* format, ...) {
  char text[1024], whole[1024 + MAX_NAME_SHOWN + 64];
  va_list given;
  va_start(given, format);
  vsnprintf(text, sizeof text, format, given);
  va_end(given);
  Name name = name_of(frame);
  int shown = name.length > MAX_NAME_SHOWN ? MAX_NAME_SHOWN : (int)name.length;
  snprintf(whole, sizeof whole, "FusionLab: %s [launch plan %.*s]", text, shown, name.name ? name.name : "");
  XLA_FFI_Error_Create_Args asked = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, whole, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&asked);
}

static XLA_FFI_Error* cuda_failure(XLA_FFI_CallFrame* frame, const char* what, int code) {
  const char* text = NULL;
  if (driver.error_text) driver.error_text(code, &text);
  return failure(frame, "BackendError: the launch of %s failed: %s (CUDA error %d)", what, text ? text : "unknown error", code);
}

// ---- Launching.

// Values of the parameters and where they are, for one launch.
typedef struct {
  uint64_t values[MAX_PARAMS];
  void* pointers[MAX_PARAMS];
} Params;

static void fill(const XLA_FFI_CallFrame* frame, const Kernel* kernel, Params* into) {
  for (int i = 0; i < kernel->count; ++i) {
    int kind = kernel->kinds[i];
    into->values[i] = kind <= RESULT ? address_in(frame, kind, (int64_t)kernel->values[i]) : kernel->values[i];
    into->pointers[i] = &into->values[i];
  }
}

static XLA_FFI_Error* launch_kernel(XLA_FFI_CallFrame* frame, const Kernel* kernel, void* stream) {
  Params params;
  fill(frame, kernel, &params);
  Attribute attributes[2];
  unsigned given = 0;
  if (kernel->early) attributes[given++] = (Attribute){PROGRAMMATIC_STREAM_SERIALIZATION, 0, {1}};
  if (kernel->cooperative) attributes[given++] = (Attribute){COOPERATIVE, 0, {1}};
  Config config = {.shared = kernel->shared, .stream = stream, .attributes = attributes, .count = given};
  memcpy(config.grid, kernel->grid, sizeof config.grid);
  memcpy(config.block, kernel->block, sizeof config.block);
  int code = driver.launch(&config, kernel->function, params.pointers, NULL);
  return code ? cuda_failure(frame, kernel->entry, code) : NULL;
}

static void* pointer_at(const XLA_FFI_CallFrame* frame, const int* place) {
  return place[0] == NOTHING ? NULL : (void*)address_in(frame, place[0], place[1]);
}

static XLA_FFI_Error* launch_matmul(XLA_FFI_CallFrame* frame, Matmul* m, void* stream) {
  enum { A, B, BIAS, AUX, C, D, WORKSPACE, PLACES };
  void* at[PLACES];
  for (int i = 0; i < PLACES; ++i) at[i] = pointer_at(frame, m->places + 2 * i);
  pthread_mutex_lock(&m->lock);
  int code = 0;
  if (m->places[2 * BIAS] != NOTHING) code = driver.set_attribute(m->desc, m->bias_attribute, &at[BIAS], sizeof(void*));
  if (!code && m->places[2 * AUX] != NOTHING) code = driver.set_attribute(m->desc, m->aux_attribute, &at[AUX], sizeof(void*));
  if (!code)
    code = driver.matmul(m->handle, m->desc, m->alpha, at[A], m->a_layout, at[B], m->b_layout, m->beta, at[C], m->d_layout, at[D],
                         m->d_layout, m->algorithm, at[WORKSPACE], m->workspace_size, stream);
  pthread_mutex_unlock(&m->lock);
  return code ? failure(frame, "BackendError: cublasLtMatmul failed with cublasStatus_t %d", code) : NULL;
}

// Python prepares and publishes a plan it is handed, and calls back; what is not found then never will be.
static XLA_FFI_Error* ask_python(XLA_FFI_CallFrame* frame, int on_cuda) {
  static _Thread_local int asking;
  if (asking) return failure(frame, "BackendError: the plan was made ready for another device than the current one");
  atomic_fetch_add_explicit(&handed_over, 1, memory_order_relaxed);
  asking = 1;
  XLA_FFI_Error* error = python[on_cuda](frame);
  asking = 0;
  return error;
}

static XLA_FFI_Error* execute(XLA_FFI_CallFrame* frame, int on_cuda) {
  Program* program = program_of(frame, on_cuda);
  if (!program) return ask_python(frame, on_cuda);
  if (!has_all(frame, program))
    return failure(frame, "BackendError: the call has %lld operands and %lld results, needed %lld and %lld", (long long)frame->args.size,
                   (long long)frame->rets.size, (long long)program->operands, (long long)program->results);
  XLA_FFI_Stream_Get_Args asked = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx, NULL};
  if (on_cuda) {
    XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&asked);
    if (error) return error;
  }
  atomic_fetch_add_explicit(&launched, 1, memory_order_relaxed);
  for (int i = 0; i < program->count; ++i) {
    Step* step = &program->steps[i];
    XLA_FFI_Error* error = step->kind == KERNEL ? launch_kernel(frame, &step->kernel, asked.stream)
                                                : launch_matmul(frame, &step->matmul, asked.stream);
    if (error) return error;
  }
  return NULL;
}

EXPORT XLA_FFI_Error* fl_execute_host(XLA_FFI_CallFrame* frame) {
  return is_question(frame) ? describe(frame) : execute(frame, 0);
}

// ---- Recording: XLA builds its CUDA graph and asks for the nodes, so that nothing is captured and a node may start early.

#ifdef XLA_FFI_Extension_Record

enum { SHARED_WITHOUT_ASKING = 48 << 10 };  // bytes; more must be asked for, of a function that only XLA has when it loads the image
enum { FUNCTION_SINCE = 2 };                // minor version of the extension that takes a loaded function

static int can_record(const Program* program, const XLA_FFI_RecordFrame* record, int takes_functions) {
  if (!program->count || program->count > record->max_commands) return 0;
  for (int i = 0; i < program->count; ++i) {
    const Step* step = &program->steps[i];
    if (step->kind != KERNEL || (!takes_functions && step->kernel.shared > SHARED_WITHOUT_ASKING)) return 0;
    if (step->kernel.cooperative) return 0;  // no node that XLA makes is
    // Captured when the graph was made, as the plan was not published yet: there is no node to update.
    if (record->action == XLA_FFI_RecordAction_Update && !record->commands[i]) return 0;
  }
  return 1;
}

static XLA_FFI_Error* record_kernel(XLA_FFI_CallFrame* frame, const Kernel* kernel, XLA_FFI_RecordFrame* record, int number,
                                    int takes_functions) {
  Params params;
  XLA_FFI_KernelArg args[MAX_PARAMS];
  fill(frame, kernel, &params);
  for (int i = 0; i < kernel->count; ++i) {
    int is_address = kernel->kinds[i] <= RESULT;
    XLA_FFI_KernelArg address = {(const void*)params.values[i], 0, XLA_FFI_KernelArgType_DevicePtr};
    XLA_FFI_KernelArg value = {&params.values[i], kernel->kinds[i] == VALUE32 ? 4 : 8, XLA_FFI_KernelArgType_HostValue};
    args[i] = is_address ? address : value;
  }
  XLA_FFI_KernelArgs given = {args, kernel->count};
  if (record->action == XLA_FFI_RecordAction_Update)
    return record->api->update_launch(record->record_ctx, record->commands[number], &given);
  XLA_FFI_LaunchDims dims = {{(int)kernel->grid[0], (int)kernel->grid[1], (int)kernel->grid[2]},
                             {(int)kernel->block[0], (int)kernel->block[1], (int)kernel->block[2]},
                             {0, 0, 0}};
  const XLA_FFI_Command* const* before = number ? &record->commands[number - 1] : NULL;
  const XLA_FFI_Command* made = NULL;
  XLA_FFI_Error* error = record->api->create_launch(
      record->record_ctx, kernel->entry, takes_functions ? kernel->function : kernel->image, takes_functions ? 0 : kernel->image_size,
      takes_functions ? (XLA_FFI_SourceFormat)2 : XLA_FFI_SourceFormat_CUBIN, dims, kernel->shared, kernel->early, &given, before,
      number ? 1 : 0, &made);
  if (!error) {
    record->commands[number] = made;
    *record->num_commands = number + 1;
  }
  return error;
}

static XLA_FFI_Error* record(XLA_FFI_CallFrame* frame) {
  if (is_question(frame)) return describe(frame);
  XLA_FFI_InvokeContext_FindExtension_Args asked = {XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE, NULL, frame->ctx,
                                                    XLA_FFI_Extension_Record, NULL};
  XLA_FFI_Error* error = frame->api->XLA_FFI_InvokeContext_FindExtension(&asked);
  if (error) return error;
  const XLA_FFI_Record_Extension* extension = (const XLA_FFI_Record_Extension*)asked.extension;
  if (!extension || extension->extension_base.id.major_version != XLA_FFI_Extension_Record_MajorVersion)
    return failure(frame, "BackendError: XLA records commands in a way that this launcher was not built for");
  XLA_FFI_RecordFrame* into = extension->record_frame;
  int takes_functions = extension->extension_base.id.minor_version >= FUNCTION_SINCE;
  Program* program = program_of(frame, 1);
  if (!program || !has_all(frame, program) || !can_record(program, into, takes_functions))
    return into->api->request_stream_capture(into->record_ctx);
  atomic_fetch_add_explicit(&recorded, 1, memory_order_relaxed);
  for (int i = 0; !error && i < program->count; ++i)
    error = record_kernel(frame, &program->steps[i].kernel, into, i, takes_functions);
  return error;
}

// The second target: JAX registers from Python the stages up to `execute` alone (its CUDA plugins 0.11.2 and 0.12.0.1), so a handler that
// records is registered through the table of functions that XLA itself passes when it asks what a handler is.
static XLA_FFI_Error* recording_execute(XLA_FFI_CallFrame* frame) {
  return is_question(frame) ? describe(frame) : execute(frame, 1);
}

// Only JAX's plugin compiles and runs programs; its Python extension has a table, and a registry, of its own.
static int of_plugin(const XLA_FFI_Api* api) {
  Dl_info info;
  if (!dladdr((void*)(uintptr_t)api->XLA_FFI_Handler_Register, &info)) return 0;
  void* library = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  int found = library && dlsym(library, "GetPjrtApi");
  if (library) dlclose(library);
  return found;
}

static void register_recording(const XLA_FFI_Api* api) {
  if (!recording_target || !api || api->struct_size < XLA_FFI_Api_STRUCT_SIZE || !of_plugin(api)) return;
  int not_yet = 0;
  if (!atomic_compare_exchange_strong(&recording_registered, &not_yet, 2)) return;  // asked again, or by another thread
  XLA_FFI_Handler_Register_Args asked = {
      XLA_FFI_Handler_Register_Args_STRUCT_SIZE,
      NULL,
      {recording_target, strlen(recording_target)},
      {"CUDA", 4},
      {.instantiate = python[1], .execute = recording_execute, .record = record},
      XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE};
  XLA_FFI_Error* error = api->XLA_FFI_Handler_Register(&asked);
  if (error) {
    XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    api->XLA_FFI_Error_Destroy(&destroyed);
  } else {
    atomic_store(&recording_registered, 1);
  }
}

EXPORT int fl_can_record(void) { return 1; }
#else
static void register_recording(const XLA_FFI_Api* api) { (void)api; }

EXPORT int fl_can_record(void) { return 0; }
#endif

// The name is kept by the host for good.
EXPORT void fl_recording_target(const char* name) { recording_target = name; }

EXPORT int fl_records(void) { return atomic_load(&recording_registered) == 1; }

EXPORT XLA_FFI_Error* fl_execute_cuda(XLA_FFI_CallFrame* frame) {
  if (!is_question(frame)) return execute(frame, 1);
  register_recording(frame->api);
  return describe(frame);
}
