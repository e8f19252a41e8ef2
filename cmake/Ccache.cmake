# Uses ccache where it is installed. A precompiled header needs the three
# sloppiness flags, since ccache otherwise refuses to cache its users.
find_program(RAGGED_CCACHE ccache)
if(RAGGED_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${RAGGED_CCACHE})
  add_compile_options(-fpch-preprocess)
endif()
