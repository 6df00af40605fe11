# find_package(distgrad): the target distgrad::distgrad. libtorch comes with it, unseen.
if(NOT TARGET distgrad::distgrad)
  get_filename_component(_distgrad_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(distgrad::distgrad SHARED IMPORTED)
  set_target_properties(distgrad::distgrad PROPERTIES
    IMPORTED_LOCATION "${_distgrad_prefix}/lib/libdistgrad.so.1"
    IMPORTED_SONAME "libdistgrad.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_distgrad_prefix}/include")
  unset(_distgrad_prefix)
endif()
