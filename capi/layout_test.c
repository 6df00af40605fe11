/* The layout and the numbers of version 1.0, which no later version may change: a struct may only
 * grow, and only one that begins with struct_size. Compiling this is the test. */
#include <stddef.h>

#include "distgrad/distgrad.h"

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)
#define GROWS_FROM(type, bytes) _Static_assert(sizeof(type) >= (bytes), #type)
#define FIELD(type, field, place) _Static_assert(offsetof(type, field) == (place), #type "." #field)
#define NUMBER(name, number) _Static_assert((name) == (number), #name)

SIZE(dg_str, 16);
FIELD(dg_str, data, 0);
FIELD(dg_str, size, 8);

SIZE(dg_value, 24);
FIELD(dg_value, kind, 0);
FIELD(dg_value, as, 8);
FIELD(dg_value, as.integer, 8);
FIELD(dg_value, as.real, 8);
FIELD(dg_value, as.complex.imaginary, 16);
FIELD(dg_value, as.string.size, 16);
FIELD(dg_value, as.tensor, 8);
FIELD(dg_value, as.integers.size, 16);
FIELD(dg_value, as.reals.size, 16);
FIELD(dg_value, as.bools.size, 16);
FIELD(dg_value, as.tensors.size, 16);

GROWS_FROM(dg_worker_options, 192);
FIELD(dg_worker_options, struct_size, 0);
FIELD(dg_worker_options, name, 8);
FIELD(dg_worker_options, rank, 24);
FIELD(dg_worker_options, world_size, 28);
FIELD(dg_worker_options, rendezvous, 32);
FIELD(dg_worker_options, transport, 48);
FIELD(dg_worker_options, host, 64);
FIELD(dg_worker_options, key_file, 80);
FIELD(dg_worker_options, thread_count, 96);
FIELD(dg_worker_options, timeout_ms, 104);
FIELD(dg_worker_options, join_timeout_ms, 112);
FIELD(dg_worker_options, flags, 120);
FIELD(dg_worker_options, job, 128);
FIELD(dg_worker_options, heartbeat_limit_ms, 144);
FIELD(dg_worker_options, max_workers, 152);
FIELD(dg_worker_options, limits, 160);
FIELD(dg_worker_options, device_pairs, 168);
FIELD(dg_worker_options, device_pair_count, 176);
FIELD(dg_worker_options, tls, 184);

GROWS_FROM(dg_tls_options, 80);
FIELD(dg_tls_options, struct_size, 0);
FIELD(dg_tls_options, cert, 8);
FIELD(dg_tls_options, key, 24);
FIELD(dg_tls_options, ca, 40);
FIELD(dg_tls_options, name, 56);
FIELD(dg_tls_options, flags, 72);

GROWS_FROM(dg_limits, 72);
FIELD(dg_limits, struct_size, 0);
FIELD(dg_limits, message_bytes, 8);
FIELD(dg_limits, tensors_per_message, 16);
FIELD(dg_limits, calls_per_peer, 24);
FIELD(dg_limits, calls, 32);
FIELD(dg_limits, bytes_per_peer, 40);
FIELD(dg_limits, contexts_per_peer, 48);
FIELD(dg_limits, unauthenticated_connections, 56);
FIELD(dg_limits, handshake_timeout_ms, 64);

GROWS_FROM(dg_device_pair, 56);
FIELD(dg_device_pair, struct_size, 0);
FIELD(dg_device_pair, peer, 8);
FIELD(dg_device_pair, local, 24);
FIELD(dg_device_pair, remote, 40);

GROWS_FROM(dg_member, 40);
FIELD(dg_member, struct_size, 0);
FIELD(dg_member, name, 8);
FIELD(dg_member, rank, 24);
FIELD(dg_member, incarnation, 32);

GROWS_FROM(dg_member_event, 64);
FIELD(dg_member_event, struct_size, 0);
FIELD(dg_member_event, kind, 8);
FIELD(dg_member_event, name, 16);
FIELD(dg_member_event, rank, 32);
FIELD(dg_member_event, incarnation, 40);
FIELD(dg_member_event, reason, 48);

SIZE(dg_entry, 32);
FIELD(dg_entry, name, 0);
FIELD(dg_entry, value, 16);

GROWS_FROM(dg_safetensors_info, 56);
FIELD(dg_safetensors_info, struct_size, 0);
FIELD(dg_safetensors_info, name, 8);
FIELD(dg_safetensors_info, dtype, 24);
FIELD(dg_safetensors_info, shape, 32);
FIELD(dg_safetensors_info, dim_count, 40);
FIELD(dg_safetensors_info, bytes, 48);

GROWS_FROM(dg_checkpoint_worker_values, 40);
FIELD(dg_checkpoint_worker_values, struct_size, 0);
FIELD(dg_checkpoint_worker_values, worker, 8);
FIELD(dg_checkpoint_worker_values, values, 24);
FIELD(dg_checkpoint_worker_values, value_count, 32);

GROWS_FROM(dg_loaded_values, 48);
FIELD(dg_loaded_values, struct_size, 0);
FIELD(dg_loaded_values, step, 8);
FIELD(dg_loaded_values, values, 16);
FIELD(dg_loaded_values, value_count, 24);
FIELD(dg_loaded_values, workers, 32);
FIELD(dg_loaded_values, worker_count, 40);

GROWS_FROM(dg_checkpoint_contents, 72);
FIELD(dg_checkpoint_contents, struct_size, 0);
FIELD(dg_checkpoint_contents, tensor_names, 8);
FIELD(dg_checkpoint_contents, tensors, 16);
FIELD(dg_checkpoint_contents, tensor_count, 24);
FIELD(dg_checkpoint_contents, optimizer_names, 32);
FIELD(dg_checkpoint_contents, optimizers, 40);
FIELD(dg_checkpoint_contents, optimizer_count, 48);
FIELD(dg_checkpoint_contents, save_values, 56);
FIELD(dg_checkpoint_contents, load_values, 64);

GROWS_FROM(dg_checkpoint_manager_options, 56);
FIELD(dg_checkpoint_manager_options, struct_size, 0);
FIELD(dg_checkpoint_manager_options, name, 8);
FIELD(dg_checkpoint_manager_options, workers, 24);
FIELD(dg_checkpoint_manager_options, worker_count, 32);
FIELD(dg_checkpoint_manager_options, keep, 40);
FIELD(dg_checkpoint_manager_options, flags, 48);

GROWS_FROM(dg_checkpoint_load_options, 32);
FIELD(dg_checkpoint_load_options, struct_size, 0);
FIELD(dg_checkpoint_load_options, step, 8);
FIELD(dg_checkpoint_load_options, timeout_ms, 16);
FIELD(dg_checkpoint_load_options, flags, 24);

GROWS_FROM(dg_pass_state, 64);
FIELD(dg_pass_state, struct_size, 0);
FIELD(dg_pass_state, id, 8);
FIELD(dg_pass_state, flags, 16);
FIELD(dg_pass_state, busy, 24);
FIELD(dg_pass_state, awaited, 32);
FIELD(dg_pass_state, awaited_count, 40);
FIELD(dg_pass_state, unacknowledged, 48);
FIELD(dg_pass_state, unacknowledged_count, 56);

GROWS_FROM(dg_context_state, 72);
FIELD(dg_context_state, struct_size, 0);
FIELD(dg_context_state, id, 8);
FIELD(dg_context_state, sends, 16);
FIELD(dg_context_state, receives, 24);
FIELD(dg_context_state, gradients, 32);
FIELD(dg_context_state, peers, 40);
FIELD(dg_context_state, peer_count, 48);
FIELD(dg_context_state, passes, 56);
FIELD(dg_context_state, pass_count, 64);

GROWS_FROM(dg_request, 64);
FIELD(dg_request, struct_size, 0);
FIELD(dg_request, function, 8);
FIELD(dg_request, from, 24);
FIELD(dg_request, message, 32);
FIELD(dg_request, context, 40);
FIELD(dg_request, timeout_ms, 48);
FIELD(dg_request, cancellation, 56);

GROWS_FROM(dg_call_options, 32);
FIELD(dg_call_options, struct_size, 0);
FIELD(dg_call_options, context, 8);
FIELD(dg_call_options, timeout_ms, 16);
FIELD(dg_call_options, cancellation, 24);

GROWS_FROM(dg_backward_options, 32);
FIELD(dg_backward_options, struct_size, 0);
FIELD(dg_backward_options, flags, 8);
FIELD(dg_backward_options, timeout_ms, 16);
FIELD(dg_backward_options, root_gradients, 24);

GROWS_FROM(dg_sgd_options, 48);
FIELD(dg_sgd_options, struct_size, 0);
FIELD(dg_sgd_options, learning_rate, 8);
FIELD(dg_sgd_options, momentum, 16);
FIELD(dg_sgd_options, dampening, 24);
FIELD(dg_sgd_options, weight_decay, 32);
FIELD(dg_sgd_options, flags, 40);

GROWS_FROM(dg_adam_options, 56);
FIELD(dg_adam_options, struct_size, 0);
FIELD(dg_adam_options, learning_rate, 8);
FIELD(dg_adam_options, beta1, 16);
FIELD(dg_adam_options, beta2, 24);
FIELD(dg_adam_options, epsilon, 32);
FIELD(dg_adam_options, weight_decay, 40);
FIELD(dg_adam_options, flags, 48);

SIZE(dg_action, 12);
FIELD(dg_action, kind, 0);
FIELD(dg_action, stage, 4);
FIELD(dg_action, micro_batch, 8);

SIZE(dg_action_list, 16);
FIELD(dg_action_list, data, 0);
FIELD(dg_action_list, size, 8);

GROWS_FROM(dg_schedule_data, 56);
FIELD(dg_schedule_data, struct_size, 0);
FIELD(dg_schedule_data, micro_batches, 8);
FIELD(dg_schedule_data, rank_of_stage, 16);
FIELD(dg_schedule_data, stage_count, 24);
FIELD(dg_schedule_data, lists, 32);
FIELD(dg_schedule_data, rank_count, 40);
FIELD(dg_schedule_data, max_activations, 48);

GROWS_FROM(dg_micro_batch, 64);
FIELD(dg_micro_batch, struct_size, 0);
FIELD(dg_micro_batch, stage, 8);
FIELD(dg_micro_batch, inputs, 16);
FIELD(dg_micro_batch, input_count, 24);
FIELD(dg_micro_batch, outputs, 32);
FIELD(dg_micro_batch, output_count, 40);
FIELD(dg_micro_batch, targets, 48);
FIELD(dg_micro_batch, target_count, 56);

GROWS_FROM(dg_pipeline_stage, 80);
FIELD(dg_pipeline_stage, struct_size, 0);
FIELD(dg_pipeline_stage, number, 8);
FIELD(dg_pipeline_stage, forward, 16);
FIELD(dg_pipeline_stage, loss, 24);
FIELD(dg_pipeline_stage, step, 32);
FIELD(dg_pipeline_stage, user_data, 40);
FIELD(dg_pipeline_stage, destroy, 48);
FIELD(dg_pipeline_stage, inputs, 56);
FIELD(dg_pipeline_stage, targets, 64);
FIELD(dg_pipeline_stage, flags, 72);
FIELD(dg_pipeline_stage, tied_names, 80);
FIELD(dg_pipeline_stage, tied, 88);
FIELD(dg_pipeline_stage, tied_count, 96);
FIELD(dg_pipeline_stage, skips, 104);
FIELD(dg_pipeline_stage, skip_count, 112);
FIELD(dg_pipeline_stage, on_action, 120);

GROWS_FROM(dg_stage_span, 48);
FIELD(dg_stage_span, struct_size, 0);
FIELD(dg_stage_span, rank, 8);
FIELD(dg_stage_span, step, 16);
FIELD(dg_stage_span, action, 24);
FIELD(dg_stage_span, begin_ns, 32);
FIELD(dg_stage_span, end_ns, 40);

GROWS_FROM(dg_pipeline_stages_options, 24);
FIELD(dg_pipeline_stages_options, struct_size, 0);
FIELD(dg_pipeline_stages_options, num_threads, 8);
FIELD(dg_pipeline_stages_options, averager, 16);

GROWS_FROM(dg_pipeline_options, 16);
FIELD(dg_pipeline_options, struct_size, 0);
FIELD(dg_pipeline_options, reduction, 8);

GROWS_FROM(dg_pipeline_run_options, 16);
FIELD(dg_pipeline_run_options, struct_size, 0);
FIELD(dg_pipeline_run_options, timeout_ms, 8);

GROWS_FROM(dg_data_parallel_options, 80);
FIELD(dg_data_parallel_options, struct_size, 0);
FIELD(dg_data_parallel_options, devices, 8);
FIELD(dg_data_parallel_options, device_count, 16);
FIELD(dg_data_parallel_options, output_device, 24);
FIELD(dg_data_parallel_options, dim, 40);
FIELD(dg_data_parallel_options, buffers, 48);
FIELD(dg_data_parallel_options, buffer_count, 56);
FIELD(dg_data_parallel_options, bucket_bytes, 64);
FIELD(dg_data_parallel_options, timeout_ms, 72);

GROWS_FROM(dg_replica, 88);
FIELD(dg_replica, struct_size, 0);
FIELD(dg_replica, index, 8);
FIELD(dg_replica, device, 16);
FIELD(dg_replica, parameters, 32);
FIELD(dg_replica, parameter_count, 40);
FIELD(dg_replica, buffers, 48);
FIELD(dg_replica, buffer_count, 56);
FIELD(dg_replica, inputs, 64);
FIELD(dg_replica, input_count, 72);
FIELD(dg_replica, output_count, 80);

GROWS_FROM(dg_process_group_options, 80);
FIELD(dg_process_group_options, struct_size, 0);
FIELD(dg_process_group_options, name, 8);
FIELD(dg_process_group_options, rank, 24);
FIELD(dg_process_group_options, size, 28);
FIELD(dg_process_group_options, backend, 32);
FIELD(dg_process_group_options, host, 48);
FIELD(dg_process_group_options, timeout_ms, 64);
FIELD(dg_process_group_options, join_timeout_ms, 72);

GROWS_FROM(dg_gradient_averager_options, 40);
FIELD(dg_gradient_averager_options, struct_size, 0);
FIELD(dg_gradient_averager_options, flags, 8);
FIELD(dg_gradient_averager_options, bucket_bytes, 16);
FIELD(dg_gradient_averager_options, buffers, 24);
FIELD(dg_gradient_averager_options, buffer_count, 32);

SIZE(dg_trace_options, 16);
FIELD(dg_trace_options, max_bytes, 8);

SIZE(dg_code, 4);
SIZE(dg_dtype, 4);
NUMBER(DG_OK, 0);
NUMBER(DG_CANCELLED, 1);
NUMBER(DG_UNKNOWN, 2);
NUMBER(DG_INVALID_ARGUMENT, 3);
NUMBER(DG_DEADLINE_EXCEEDED, 4);
NUMBER(DG_NOT_FOUND, 5);
NUMBER(DG_ALREADY_EXISTS, 6);
NUMBER(DG_PERMISSION_DENIED, 7);
NUMBER(DG_RESOURCE_EXHAUSTED, 8);
NUMBER(DG_FAILED_PRECONDITION, 9);
NUMBER(DG_ABORTED, 10);
NUMBER(DG_OUT_OF_RANGE, 11);
NUMBER(DG_UNIMPLEMENTED, 12);
NUMBER(DG_INTERNAL, 13);
NUMBER(DG_UNAVAILABLE, 14);
NUMBER(DG_DATA_LOSS, 15);
NUMBER(DG_UNAUTHENTICATED, 16);
NUMBER(DG_UINT8, 0);
NUMBER(DG_INT8, 1);
NUMBER(DG_INT16, 2);
NUMBER(DG_INT32, 3);
NUMBER(DG_INT64, 4);
NUMBER(DG_FLOAT16, 5);
NUMBER(DG_FLOAT32, 6);
NUMBER(DG_FLOAT64, 7);
NUMBER(DG_COMPLEX32, 8);
NUMBER(DG_COMPLEX64, 9);
NUMBER(DG_COMPLEX128, 10);
NUMBER(DG_BOOL, 11);
NUMBER(DG_BFLOAT16, 15);
NUMBER(DG_FLOAT8_E5M2, 23);
NUMBER(DG_FLOAT8_E4M3FN, 24);
NUMBER(DG_UINT16, 27);
NUMBER(DG_UINT32, 28);
NUMBER(DG_UINT64, 29);
NUMBER(DG_VALUE_NONE, 0);
NUMBER(DG_VALUE_INTEGER, 1);
NUMBER(DG_VALUE_REAL, 2);
NUMBER(DG_VALUE_BOOL, 3);
NUMBER(DG_VALUE_COMPLEX, 4);
NUMBER(DG_VALUE_STRING, 5);
NUMBER(DG_VALUE_TENSOR, 6);
NUMBER(DG_VALUE_INTEGERS, 7);
NUMBER(DG_VALUE_REALS, 8);
NUMBER(DG_VALUE_BOOLS, 9);
NUMBER(DG_VALUE_TENSORS, 10);
NUMBER(DG_WORKER_NO_OPERATORS, 1);
NUMBER(DG_WORKER_ALL_OPERATORS, 2);
NUMBER(DG_WORKER_JOIN, 4);
NUMBER(DG_WORKER_NO_GPU_CHANNEL, 8);
NUMBER(DG_TLS_ENCRYPT_LOCAL, 1);
NUMBER(DG_TLS_NO_ENCRYPT_LOCAL, 2);
NUMBER(DG_BACKWARD_RETAIN_GRAPH, 1);
NUMBER(DG_SGD_NESTEROV, 1);
NUMBER(DG_ADAM_AMSGRAD, 1);
NUMBER(DG_ACTION_FORWARD, 0);
NUMBER(DG_ACTION_BACKWARD, 1);
NUMBER(DG_ACTION_BACKWARD_INPUT, 2);
NUMBER(DG_ACTION_BACKWARD_WEIGHT, 3);
NUMBER(DG_ACTION_SEND_ACTIVATION, 4);
NUMBER(DG_ACTION_RECEIVE_ACTIVATION, 5);
NUMBER(DG_ACTION_SEND_GRADIENT, 6);
NUMBER(DG_ACTION_RECEIVE_GRADIENT, 7);
NUMBER(DG_ACTION_STEP, 8);
NUMBER(DG_SCHEDULE_ADD_TRANSFERS, 1);
NUMBER(DG_SCHEDULE_ADD_STEPS, 2);
NUMBER(DG_PIPELINE_STAGE_RECOMPUTE, 1);
NUMBER(DG_ANY_COUNT, -1);
NUMBER(DG_REDUCTION_MEAN, 0);
NUMBER(DG_REDUCTION_SUM, 1);
NUMBER(DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE, 1);
NUMBER(DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS, 1);
NUMBER(DG_CHECKPOINT_ALLOW_DROPPING, 1);
NUMBER(DG_CHECKPOINT_LOAD_NOT_STRICT, 1);
NUMBER(DG_CHECKPOINT_LOAD_FALL_BACK, 2);
NUMBER(DG_LOADED_MISSING, 1);
NUMBER(DG_LOADED_UNEXPECTED, 2);
NUMBER(DG_LOADED_MISMATCHED, 3);
NUMBER(DG_FOREVER, -1);

int main(void) { return 0; }
