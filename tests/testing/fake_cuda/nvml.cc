// What libtorch looks up in NVML, libnvidia-ml.so.1, for messages about memory: it knows every
// device, and of no process. The machine's own, where it has one, knows nothing of the fake
// devices.

extern "C" {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;

int nvmlInit_v2() { return kSuccess; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, const void** device) {
  *device = id;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV() { return kNotSupported; }

}  // extern "C"
