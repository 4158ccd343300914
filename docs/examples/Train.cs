// Trains the digits in C# 12, with the package Microsoft.ML.OnnxRuntime: dotnet run -- FOLDER
using System.Runtime.InteropServices;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;

var folder = args[0];
var (state, header) = Read(Path.Combine(folder, "digits-training.safetensors"));
var (data, _) = Read(Path.Combine(folder, "digits-data.safetensors"));
var contract = JsonDocument.Parse(header.GetProperty("__metadata__").GetProperty("onnxgc.contract").GetString()!).RootElement;
var pairs = contract.GetProperty("pairs").EnumerateObject().ToDictionary(pair => pair.Name, pair => pair.Value.GetString()!);
var loss = contract.GetProperty("loss").GetString()!;
List<string> fetched = [loss, .. pairs.Values];
using var options = new SessionOptions { EnableMemoryPattern = false, IntraOpNumThreads = 1 };
using var run = new RunOptions();
using var session = new InferenceSession(Path.Combine(folder, "digits-training.onnx"), options);
var feeds = state.ToDictionary(entry => entry.Key, entry => entry.Value.Value());
IDisposable? before = null;
const int size = 32;
var batches = (int)(data["x"].Shape[0] / size);
for (var update = 0; update < 3 * batches; update++)
{
    var batch = new Dictionary<string, OrtValue>();
    foreach (var name in new[] { "x", "labels" }) batch[name] = data[name].Part(update % batches, size).Value();
    batch["learning_rate"] = OrtValue.CreateTensorValueFromMemory(new[] { 0.003f }, []);
    batch["step"] = OrtValue.CreateTensorValueFromMemory(new[] { update + 1L }, []);
    batch["draw"] = OrtValue.CreateTensorValueFromMemory(new[] { (long)update }, []);
    foreach (var (name, value) in batch) feeds[name] = value;
    var results = session.Run(run, feeds, fetched);
    foreach (var (old, next) in pairs) feeds[old] = results[fetched.IndexOf(next)];
    Console.WriteLine(results[0].GetTensorDataAsSpan<float>()[0]);
    foreach (var value in batch.Values) value.Dispose();
    before?.Dispose();
    before = results;
}

static (Dictionary<string, Tensor>, JsonElement) Read(string path)
{
    var content = File.ReadAllBytes(path);
    var start = 8 + (int)BitConverter.ToInt64(content);
    var header = JsonDocument.Parse(content.AsMemory(8, start - 8)).RootElement;
    var tensors = new Dictionary<string, Tensor>();
    foreach (var entry in header.EnumerateObject().Where(entry => entry.Name != "__metadata__"))
    {
        var offsets = entry.Value.GetProperty("data_offsets").EnumerateArray().Select(x => start + x.GetInt32()).ToArray();
        var shape = entry.Value.GetProperty("shape").EnumerateArray().Select(x => x.GetInt64()).ToArray();
        tensors[entry.Name] = new(entry.Value.GetProperty("dtype").GetString() == "F32", content[offsets[0]..offsets[1]], shape);
    }
    return (tensors, header);
}

record Tensor(bool IsFloat, byte[] Data, long[] Shape)
{
    public OrtValue Value() => IsFloat
        ? OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, float>(Data).ToArray(), Shape)
        : OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, long>(Data).ToArray(), Shape);
    private int Sample => (int)(Data.Length / Shape[0]);
    public Tensor Part(int index, int size) =>
        new(IsFloat, Data[(index * size * Sample)..((index + 1) * size * Sample)], [size, .. Shape[1..]]);
}
