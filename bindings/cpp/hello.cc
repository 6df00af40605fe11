// One call: worker 0 sends a greeting to worker 1, which answers.
#include <iostream>
#include <string>

#include "job.h"

int main() {
  return RunJob(2, [](dg::Worker& worker) {
    worker.Register("greet", [](const dg::Request& request) {
      return dg::Message("Hello " + std::string(request.payload()) + ", this is worker 1");
    });
    worker.Barrier();  // both have registered
    if (worker.rank() > 0) return;
    const dg::Message reply = worker.Call("worker1", "greet", dg::Message("worker 0"));
    std::cout << reply.payload() << std::endl;
  });
}
