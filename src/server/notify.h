/*
 * Telling the service manager: READY=1, STOPPING=1, STATUS=... to the socket in NOTIFY_SOCKET, as sd_notify does. Nothing happens
 * without it.
 */
#ifndef PF_SERVER_NOTIFY_H
#define PF_SERVER_NOTIFY_H

void notify_manager(const char *text);

#endif
