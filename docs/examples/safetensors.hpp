// The safetensors format and tensors of ONNX Runtime's C API.
#pragma once
#include <fstream>
#include <map>
#include <regex>
#include <stdexcept>
#include <vector>
#include "onnxruntime_c_api.h"

using std::string, std::vector;
const OrtApi* ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
void check(OrtStatus* status) { if (status) throw std::runtime_error(ort->GetErrorMessage(status)); }
vector<std::smatch> all(const string& text, const char* pattern) {
  std::regex expression(pattern);
  return {std::sregex_iterator(text.begin(), text.end(), expression), {}};
}

struct Tensor { bool is_float; char* data; size_t bytes; vector<int64_t> shape; };
OrtValue* value_of(const Tensor& t) {  // The memory stays the tensor's.
  OrtMemoryInfo* memory; OrtValue* value;
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  auto type = t.is_float ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  check(ort->CreateTensorWithDataAsOrtValue(memory, t.data, t.bytes, t.shape.data(), t.shape.size(), type, &value));
  return value;
}
std::map<string, Tensor> read(const string& path, string& content, string& header) {
  std::ifstream file(path, std::ios::binary);
  content.assign(std::istreambuf_iterator<char>(file), {});
  header = content.substr(8, *(uint64_t*)content.data());
  std::map<string, Tensor> tensors;
  auto entry = R"re("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})re";
  for (auto& m : all(header, entry)) {
    size_t first = std::stoull(m[4]), last = std::stoull(m[5]);
    Tensor& t = tensors[m[1]] = {m[2] == "F32", &content[8 + header.size() + first], last - first, {}};
    string sizes = m[3];
    for (auto& size : all(sizes, "\\d+")) t.shape.push_back(std::stoll(size.str()));
  }
  return tensors;
}
