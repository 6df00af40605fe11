// A whole program, without the samples' common file: a worker that calls a function of its own.
// Where a launcher starts it in several processes, each of them calls the last one.
#include <distgrad/distgrad.hpp>
#include <exception>
#include <iostream>
#include <string>

int main() {
  try {
    dg_worker_options options = DG_WORKER_OPTIONS_INIT;  // alone, or as the launcher says
    dg::Worker worker(options);
    worker.Register("sum", [](const dg::Request& request) {
      return dg::Message("", {dg::Op("aten::sum", {request.tensor(0)})});
    });
    worker.Barrier();  // all have registered
    const std::string last(worker.name(worker.world_size() - 1));
    const dg::Tensor numbers = dg::Tensor::From<float>({1, 2, 3}, {3});
    const dg::Tensor sum = worker.Call(last, "sum", dg::Message("", {numbers})).tensor(0);
    std::cout << last << " says " << *sum.data<float>() << std::endl;
    worker.Shutdown();  // waits for the others
    return *sum.data<float>() == 6 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
