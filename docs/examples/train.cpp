// Trains the digits by ONNX Runtime's C API: g++ -std=c++17 train.cpp -I HEADERS -lonnxruntime -o train && ./train FOLDER
#include <cstdio>
#include "safetensors.hpp"

int main(int, char** arguments) {
  string folder = arguments[1], contents[2], headers[2];
  OrtEnv* env; OrtSessionOptions* options; OrtSession* session;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "", &env));
  check(ort->CreateSessionOptions(&options));
  check(ort->DisableMemPattern(options));
  check(ort->SetIntraOpNumThreads(options, 1));
  check(ort->CreateSession(env, (folder + "/digits-training.onnx").c_str(), options, &session));
  auto state = read(folder + "/digits-training.safetensors", contents[0], headers[0]);
  auto data = read(folder + "/digits-data.safetensors", contents[1], headers[1]);
  vector<string> old{""}, fetched{"loss"};  // Names of the contract, whose JSON is a text in the header.
  string contract = std::regex_replace(headers[0], std::regex(R"(\\)"), ""), pairs = all(contract, R"re("pairs": \{[^}]*)re")[0].str();
  for (auto& m : all(pairs, R"re("([^"]+)": "([^"]+)")re")) old.push_back(m[1]), fetched.push_back(m[2]);
  float rate = 0.003f; int64_t step = 0, draw = 0, size = 32, batches = data["x"].shape[0] / size;
  std::map<string, OrtValue*> feeds{{"learning_rate", value_of({true, (char*)&rate, 4, {}})},
      {"step", value_of({false, (char*)&step, 8, {}})}, {"draw", value_of({false, (char*)&draw, 8, {}})}};
  for (auto& [name, tensor] : state) feeds[name] = value_of(tensor);
  for (; step < 3 * batches; draw = step) {
    for (string name : {"x", "labels"}) {
      Tensor t = data[name];
      t.shape[0] = size, t.bytes /= batches, t.data += t.bytes * (step % batches), feeds[name] = value_of(t);
    }
    step++;
    vector<const char*> names, outputs; vector<OrtValue*> values, results(fetched.size());
    for (auto& [name, value] : feeds) names.push_back(name.c_str()), values.push_back(value);
    for (auto& name : fetched) outputs.push_back(name.c_str());
    check(ort->Run(session, 0, names.data(), values.data(), values.size(), outputs.data(), outputs.size(), results.data()));
    for (auto name : {"x", "labels"}) ort->ReleaseValue(feeds[name]);
    for (size_t i = 1; i < old.size(); i++) ort->ReleaseValue(feeds[old[i]]), feeds[old[i]] = results[i];
    float* loss;
    check(ort->GetTensorMutableData(results[0], (void**)&loss));
    std::printf("%.9g\n", *loss);
    ort->ReleaseValue(results[0]);
  }
}
