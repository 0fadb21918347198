// XLA's and CUDA's parts, played by notes: it calls the handlers of launcher.c with frames, and notes what they ask for. Not product code.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"
#if XLA_FFI_API_MINOR >= 4
#include "xla/ffi/api/record_c_api.h"
#endif

static char notes[1 << 16];
static size_t used;
static int device, launch_status, matmul_status;

static void note(const char* format, ...) {
  va_list given;
  va_start(given, format);
  used += vsnprintf(notes + used, sizeof notes - used, format, given);
  va_end(given);
}

const char* fx_notes(void) {
  used = 0;
  return notes;
}
void fx_clear(void) { notes[used = 0] = 0; }
void fx_set(int device_, int launch_status_, int matmul_status_) {
  device = device_, launch_status = launch_status_, matmul_status = matmul_status_;
}

// ---- CUDA.

int fx_device(int* found) {
  *found = device;
  return 0;
}
int fx_text(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access was encountered" : NULL;
  return 0;
}

typedef struct {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char bytes[64];
    int number;
    void* pointer;
  } value;
} LaunchAttribute;
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
} LaunchConfig;

int fx_launch(const LaunchConfig* c, void* function, void** params, void** extra) {
  note("launch %p grid %u %u %u block %u %u %u shared %u stream %p", function, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y,
       c->block_z, c->shared, c->stream);
  for (unsigned i = 0; i < c->count; ++i) note(" attribute %d=%d", c->attributes[i].id, c->attributes[i].value.number);
  note(" params %lld %lld%s;", *(long long*)params[0], *(long long*)params[1], extra ? " extra" : "");
  return launch_status;
}
int fx_set_attribute(void* desc, int attribute, const void* value, size_t size) {
  note("set %p %d=%p of %zu;", desc, attribute, *(void* const*)value, size);
  return 0;
}
int fx_matmul(void* handle, void* desc, const void* one, const void* a, void* a_layout, const void* b, void* b_layout, const void* zero,
              const void* c, void* c_layout, void* d, void* d_layout, const void* algorithm, void* workspace, size_t size, void* stream) {
  note("matmul %p %p %p %p %p %p %p %p %p %p %p %p %p %p %zu %p;", handle, desc, one, a, a_layout, b, b_layout, zero, c, c_layout, d,
       d_layout, algorithm, workspace, size, stream);
  return matmul_status;
}

// ---- XLA.

static XLA_FFI_Error* error_create(XLA_FFI_Error_Create_Args* args) {
  note("error %d %s;", args->errc, args->message);
  return (XLA_FFI_Error*)0x99;
}
static void error_destroy(XLA_FFI_Error_Destroy_Args* args) { note("destroyed %p;", (void*)args->error); }
static XLA_FFI_Error* stream_get(XLA_FFI_Stream_Get_Args* args) {
  args->stream = (void*)0x57;
  return NULL;
}
static XLA_FFI_Handler_Bundle bundle;
static int refuses;
static XLA_FFI_Error* handler_register(XLA_FFI_Handler_Register_Args* args) {
  note("registered %.*s on %.*s traits %u;", (int)args->name.len, args->name.ptr, (int)args->platform.len, args->platform.ptr, args->traits);
  bundle = args->bundle;
  return refuses ? (XLA_FFI_Error*)0x98 : NULL;
}
static XLA_FFI_Api api = {.struct_size = XLA_FFI_Api_STRUCT_SIZE,
                          .XLA_FFI_Error_Create = error_create,
                          .XLA_FFI_Error_Destroy = error_destroy,
                          .XLA_FFI_Stream_Get = stream_get,
                          .XLA_FFI_Handler_Register = handler_register};
#ifdef FX_IS_PLUGIN
const void* GetPjrtApi(void) { return NULL; }  // what tells JAX's plugin
#endif

static XLA_FFI_Handler* called_back;  // by the Python handler, as for a plan that it has published
void fx_call_back(XLA_FFI_Handler* handler) { called_back = handler; }
XLA_FFI_Error* fx_python(XLA_FFI_CallFrame* frame) {
  note("python;");
  return called_back ? called_back(frame) : NULL;
}

// Operands have the addresses 0x1000, 0x2000 ..., results 0x10000, 0x20000 ...
static XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, const char* name, int operands, int results) {
  XLA_FFI_Buffer buffers[16];
  void *in[8], *out[8];
  for (int i = 0; i < 8; ++i) {
    buffers[i].data = (void*)(0x1000l * (i + 1));
    buffers[8 + i].data = (void*)(0x10000l * (i + 1));
    in[i] = &buffers[i], out[i] = &buffers[8 + i];
  }
  XLA_FFI_ByteSpan text = {name, strlen(name)};
  XLA_FFI_AttrType type = XLA_FFI_AttrType_STRING;
  void* attrs[1] = {&text};
  XLA_FFI_CallFrame frame = {.api = &api, .stage = stage};
  frame.args.size = operands, frame.args.args = in;
  frame.rets.size = results, frame.rets.rets = out;
  frame.attrs.size = 1, frame.attrs.types = &type, frame.attrs.attrs = attrs;
  return handler(&frame);
}
long fx_execute(XLA_FFI_Handler* handler, const char* name, int operands, int results) {
  return (long)call(handler ? handler : bundle.execute, XLA_FFI_ExecutionStage_EXECUTE, name, operands, results);
}

// XLA asks what a handler is; returns its traits, or -1 where it answers with an error.
int fx_ask(XLA_FFI_Handler* handler, int refuses_) {
  XLA_FFI_Metadata metadata = {.struct_size = XLA_FFI_Metadata_STRUCT_SIZE};
  XLA_FFI_Metadata_Extension extension = {.metadata = &metadata};
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  XLA_FFI_CallFrame frame = {.api = &api, .stage = XLA_FFI_ExecutionStage_EXECUTE};
  frame.extension_start = &extension.extension_base;
  refuses = refuses_;
  if (handler(&frame)) return -1;
  note("version %d.%d;", metadata.api_version.major_version, metadata.api_version.minor_version);
  return (int)metadata.traits;
}
void* fx_instantiate(void) { return (void*)bundle.instantiate; }

#ifdef XLA_FFI_Extension_Record
static const XLA_FFI_Command* commands[16];
static int64_t count;
static XLA_FFI_Record_Extension extension;
static XLA_FFI_RecordFrame record_frame;

static XLA_FFI_Error* create(XLA_FFI_RecordContext* ctx, const char* name, const void* data, int64_t size, XLA_FFI_SourceFormat format,
                             XLA_FFI_LaunchDims dims, uint32_t shared, int32_t pdl, const XLA_FFI_KernelArgs* args,
                             const XLA_FFI_Command* const* before, uint32_t before_count, const XLA_FFI_Command** out) {
  (void)ctx;
  note("create %s format %d", name, format);
  if (size) note(" image %.*s", (int)size, (const char*)data);
  else note(" function %p", data);
  note(" grid %d %d %d block %d %d %d cluster %d shared %u pdl %d args", dims.grid.x, dims.grid.y, dims.grid.z, dims.block.x, dims.block.y,
       dims.block.z, dims.cluster.x, shared, pdl);
  for (int64_t i = 0; i < args->num_args; ++i)
    if (args->args[i].type == XLA_FFI_KernelArgType_DevicePtr) note(" %p:%lld", args->args[i].arg_address, (long long)args->args[i].size);
    else note(" value %d:%lld", *(const int*)args->args[i].arg_address, (long long)args->args[i].size);
  for (uint32_t i = 0; i < before_count; ++i) note(" after %ld", (long)before[i]);
  *out = (const XLA_FFI_Command*)(count + 71);
  note(" is %ld;", (long)*out);
  return NULL;
}
static XLA_FFI_Error* update(XLA_FFI_RecordContext* ctx, const XLA_FFI_Command* command, const XLA_FFI_KernelArgs* args) {
  (void)ctx;
  note("update %ld %p;", (long)command, args->args[0].arg_address);
  return NULL;
}
static XLA_FFI_Error* capture(XLA_FFI_RecordContext* ctx) {
  (void)ctx;
  note("capture;");
  return NULL;
}
static const XLA_FFI_RecordApi record_api = {.create_launch = create, .update_launch = update, .request_stream_capture = capture};
static XLA_FFI_Error* find_extension(XLA_FFI_InvokeContext_FindExtension_Args* args) {
  args->extension = args->extension_type == XLA_FFI_Extension_Record ? &extension.extension_base : NULL;
  return NULL;
}
long fx_record(const char* name, int updates, int max_commands, int major, int minor, int operands, int results) {
  api.XLA_FFI_InvokeContext_FindExtension = find_extension;
  if (!updates) count = 0;
  record_frame.api = &record_api;
  record_frame.action = updates ? XLA_FFI_RecordAction_Update : XLA_FFI_RecordAction_Create;
  record_frame.commands = commands, record_frame.num_commands = &count, record_frame.max_commands = max_commands;
  extension.extension_base.id.major_version = major, extension.extension_base.id.minor_version = minor;
  extension.record_frame = &record_frame;
  long answer = (long)call(bundle.record, XLA_FFI_ExecutionStage_RECORD, name, operands, results);
  note("count %ld;", (long)count);
  return answer;
}
#endif
